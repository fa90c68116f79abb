"""A prompt as blocks: numbers that are equal where prompts begin with the same text.

An upstream's KV blocks are of tokens, which the gateway does not have. Blocks of text stand in for them.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

BLOCK_BYTES = 1024
"""About 256 tokens of English: small enough that a turn of a conversation is a block or more, and large enough that a
prompt of 26 KB is 26 numbers."""
MAX_BLOCKS = 512
"""Of a longer prompt only so many blocks count: half a megabyte in which two prompts agree is reason enough."""
_MAX_BYTES = MAX_BLOCKS * BLOCK_BYTES

_encode = msgspec.json.Encoder(order="deterministic").encode
_FIELDS = ("tools", "functions", "system", "instructions", "messages", "prompt", "input", "suffix")
"""In the order in which chat templates put them before the model."""


def prompt_blocks(namespace: str, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """A number for each block of the prompt in a request's fields; () where there is none.

    A number is the hash (xxh3) of all text up to the end of its block. `namespace` comes first: tenants whose KV blocks
    are separate share none. An unfinished block at the end has no number, unless it is the only one.
    """
    text = _rendered(fields)
    if not text:
        return ()
    chain = xxhash.xxh3_64(namespace.encode("utf-8", "surrogatepass"))
    whole = max(1, min(len(text), _MAX_BYTES) // BLOCK_BYTES)
    blocks: list[int] = []
    for start in range(0, whole * BLOCK_BYTES, BLOCK_BYTES):
        chain.update(text[start : start + BLOCK_BYTES])
        blocks.append(chain.intdigest())
    return tuple(blocks)


def _rendered(fields: Mapping[str, Any]) -> bytes:
    """The beginning of the prompt as text of its own: a message more appends to it, and changes nothing before."""
    parts: list[bytes] = []
    size = 0
    for name in _FIELDS:
        value = fields.get(name)
        for item in value if isinstance(value, list) else (() if value is None else (value,)):
            part = item.encode("utf-8", "surrogatepass") if isinstance(item, str) else _encode(item)
            parts += (name.encode(), part)
            size += len(part)
            if size > _MAX_BYTES:
                return b"\0".join(parts)
    return b"\0".join(parts)
