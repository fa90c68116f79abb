"""Reads a trace of any format."""

import itertools
from pathlib import Path

import msgspec

from prefix_store.replay import agent, azure, mooncake
from prefix_store.replay.lines import read_lines
from prefix_store.replay.trace import Trace, TraceError

_STYLES = f"""\
  Mooncake: {mooncake.EXPECTED}
  agent: {agent.EXPECTED}
  Azure: a header line with {", ".join(azure.COLUMNS)}"""


def read_trace(file: Path, block_tokens: int | None = None) -> Trace:
    """Reads a trace, plain or gzip; the first line determines its style.

    Args:
        block_tokens: tokens of a block, if the file does not say it: 512 for Mooncake's, 16 for Azure's.

    Raises:
        TraceError: the file cannot be read or is no trace, with a message for each bad line.
    """
    lines = read_lines(file)
    first = next(lines, None)
    if first is None:
        raise TraceError([f"{file}: is empty"])
    number, text = first
    lines = itertools.chain([first], lines)
    if text.startswith("{"):
        try:
            names = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).keys()
        except msgspec.DecodeError as error:
            raise TraceError([f"{file} line {number}: {error}"]) from error
        if "requests" in names:
            if block_tokens is not None:
                raise TraceError([f"{file}: says itself how long a block is; leave out --block-tokens"])
            return agent.read_agent(file, lines)
        if "hash_ids" in names:
            return mooncake.read_mooncake(file, lines, block_tokens or mooncake.BLOCK_TOKENS)
    elif azure.COLUMNS[1] in text:
        return azure.read_azure(file, lines, block_tokens or azure.BLOCK_TOKENS)
    raise TraceError([f"{file} line {number}: is of no known style:\n{_STYLES}"])
