"""Which KV block it is."""

from __future__ import annotations

from dataclasses import dataclass, fields

ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockId:
    """The keys and values of some tokens after those of the blocks before them, by one model. 16 bytes each.

    Args:
        namespace: fingerprint of all that decides the numbers: weights, quantisation, tokenizer, RoPE, dtype, layout.
        key: of the block, from its parent's key and its tokens.
        parent: key of the block before it; of a first block, the seed.
        tokens: xxh3-128 digest of the block's own token ids.

    Raises:
        ValueError: one of them has another size.
    """

    namespace: bytes
    key: bytes
    parent: bytes
    tokens: bytes

    def __post_init__(self) -> None:
        for field in fields(self):
            size = len(getattr(self, field.name))
            if size != ID_BYTES:
                raise ValueError(f"{field.name} has {size} bytes, expected {ID_BYTES}")
