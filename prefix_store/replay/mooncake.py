"""Mooncake's traces: one JSON object per line, with a number for each block of 512 tokens.

Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST '25.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from prefix_store.replay.lines import BadLine, parse_lines
from prefix_store.replay.trace import Trace, TraceRequest

BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]


class _Reader:
    """Parses lines, and checks that a number always means the same prefix."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._decode = msgspec.json.Decoder(_Line).decode
        self._before: dict[int, int] = {}

    def parse(self, text: str) -> TraceRequest:
        try:
            line = self._decode(text)
        except msgspec.DecodeError as error:
            raise BadLine(f"{error}; {EXPECTED}") from error
        for name in ("timestamp", "input_length", "output_length"):
            if getattr(line, name) < 0:
                raise BadLine(f"{name} is {getattr(line, name)}, expected at least 0")
        blocks = -(-line.input_length // self._block_tokens)
        if blocks != len(line.hash_ids):
            raise BadLine(
                f"hash_ids has {len(line.hash_ids)} numbers; {line.input_length} tokens are {blocks} blocks of"
                f" {self._block_tokens} (--block-tokens says how long a block is)"
            )
        before = -1
        for number in line.hash_ids:
            if self._before.setdefault(number, before) != before:
                raise BadLine(
                    f"hash_ids: {number} stands for another prefix in an earlier place; a number means the same"
                    " beginning wherever it stands"
                )
            before = number
        return TraceRequest(line.timestamp / 1000, line.input_length, line.output_length, line.hash_ids)


EXPECTED = 'expected {"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}'


def read_mooncake(file: Path, lines: Iterator[tuple[int, str]], block_tokens: int) -> Trace:
    """Raises TraceError, with a message for each bad line."""
    requests = [request for _, request in parse_lines(file, lines, _Reader(block_tokens).parse)]
    requests.sort(key=lambda request: request.time)
    return Trace("mooncake", block_tokens, len(requests), lambda: iter(requests))
