"""A digest of everything that a block's bytes depend on, except its tokens."""

import hashlib
from collections.abc import Mapping

import msgspec

from prefix_store.identity.encoding import Value, encoded

DIGEST_BYTES = 16


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What engines must have in common to share blocks. Derived by code; no namespace is set by hand.

    Engines with one model name but other weights, quantisation or layout have no key in common. Raises ValueError at
    once for a part that is missing.
    """

    weights: bytes
    """Digest of the weight files: `prefix_store.identity.files`."""
    tokenizer: bytes
    """Digest of the tokenizer's files: equal token ids must mean equal text."""
    quantisation: str
    """Of the weights as they are computed with: "none", "Q4_1", …"""
    rope: Value
    """Bases and scalings of the rotary embedding, for every layer where they differ."""
    geometry: Mapping[str, Value]
    """Layers, KV heads, head dimension, windows, and what else changes keys and values of a layer."""
    numerics: str
    """Precision and kernels that compute the blocks, such as "bfloat16 fused". Engines that round differently
    compute different bits; engines with the same value here accept each other's blocks."""
    kv_dtype: str
    """Of the stored keys and values: "bfloat16", "int8", …"""
    layout: int
    """Version of the order of a block's bytes; raised with every change of it."""
    block_size: int
    """Tokens in a block."""

    def __post_init__(self) -> None:
        for name in ("weights", "tokenizer"):
            if len(getattr(self, name)) < DIGEST_BYTES:
                raise ValueError(f"{name} has {len(getattr(self, name))} bytes, expected a digest of 16 or more")
        for name in ("quantisation", "numerics", "kv_dtype"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; name it, and write 'none' where there is none")
        if not self.geometry:
            raise ValueError("geometry is empty, expected the model's dimensions by name")
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, expected at least 1")

    @property
    def digest(self) -> bytes:
        """16 bytes: BLAKE2b of all parts with their names, typed and length-delimited."""
        parts = {name: getattr(self, name) for name in self.__struct_fields__}
        return hashlib.blake2b(encoded(parts), digest_size=DIGEST_BYTES, person=b"kg-fingerprint").digest()
