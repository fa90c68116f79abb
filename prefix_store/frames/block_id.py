"""KV block identities."""

from __future__ import annotations

from dataclasses import dataclass, fields

ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockId:
    """Identifies the keys and values of one model for a block of tokens after a prefix. 16 bytes each.

    Args:
        namespace: fingerprint of what determines the numbers: weights, quantisation, tokenizer, RoPE, dtype, layout.
        key: of the block, from its parent's key and its tokens.
        parent: key of the previous block, or the root key.
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
