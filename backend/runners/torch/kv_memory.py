"""The torch runner's paged memory of keys and values, as computed or quantised to one byte an element."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch

from backend.engine.kv_blocks import HostKvBlocks, KvBlocks
from backend.engine.model_runner import BLOCK_SIZE
from backend.models.config import KvDtype, ModelConfig
from prefix_store.frames.layout import BlockLayout

_STORED: dict[KvDtype, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Smallest divisor for a vector of zeros; anything that float16 can hold is far above it.
_TINY = 1e-30


class KvMemory:
    """Keys and values of all layers, by slot (block * BLOCK_SIZE + offset).

    ``int8`` and ``fp8`` (e4m3) are symmetric: each token's key and value vector of each head has a float32 scale, so
    that the largest element of the vector is the largest that the format holds. An int8 element is then off by at most
    1/254 of the vector's largest, an fp8 one by at most 1/16 of itself (or 1/448 · 2⁻¹⁰ of the largest, where that is
    more).

    Args:
        num_blocks: memory is ``num_blocks * block_bytes(config, dtype, kv_dtype)`` bytes.
        dtype: what keys and values are computed in, and given back in.
        buffer: so many bytes, all 0 at first; None: memory of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        kv_dtype: KvDtype,
        buffer: torch.Tensor | None = None,
    ) -> None:
        self._dtype = dtype
        self._stored = _STORED.get(kv_dtype, dtype)
        shape = (2, config.num_layers, num_blocks * BLOCK_SIZE, config.num_kv_heads)
        size = math.prod(shape) * config.head_dim * self._stored.itemsize
        if buffer is None:
            buffer = torch.zeros(num_blocks * self.block_bytes(config, dtype, kv_dtype), dtype=torch.uint8)
        self._vectors = buffer[:size].view(self._stored).view(*shape, config.head_dim)
        self._scales = buffer[size:].view(torch.float32).view(shape) if kv_dtype in _STORED else None

    def part(self, layers: slice, heads: slice) -> KvMemory:
        """The same memory, of some layers and KV heads alone."""
        part = copy.copy(self)
        part._vectors = self._vectors[:, layers, :, heads]
        part._scales = None if self._scales is None else self._scales[:, layers, :, heads]
        return part

    @staticmethod
    def block_bytes(config: ModelConfig, dtype: torch.dtype, kv_dtype: KvDtype) -> int:
        """Bytes of one KV block over all layers, scales included."""
        vector = config.head_dim * _STORED.get(kv_dtype, dtype).itemsize
        scale = torch.float32.itemsize if kv_dtype in _STORED else 0
        return 2 * config.num_layers * BLOCK_SIZE * config.num_kv_heads * (vector + scale)

    @property
    def blocks(self) -> KvBlocks:
        """The blocks of all layers, scales included."""
        parts, layers, slots, heads, dimensions = self._vectors.shape
        # Not every number of torch has a name in NumPy: bytes do.
        vectors = self._vectors.view(torch.uint8).view(parts, layers, slots // BLOCK_SIZE, -1).numpy()
        if self._scales is None:
            shape = (parts, layers, BLOCK_SIZE, heads, dimensions)
            layout = BlockLayout(str(self._stored).removeprefix("torch."), shape, "plthd")
            return HostKvBlocks(layout, [vectors], block_axis=2)
        scales = self._scales.view(torch.uint8).view(parts, layers, slots // BLOCK_SIZE, -1).numpy()
        size = vectors[:, :, 0].size + scales[:, :, 0].size
        return HostKvBlocks(BlockLayout("uint8", (size,)), [vectors, scales], block_axis=2)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [T, kv heads, head_dim] at the slots [T]."""
        for part, vectors in enumerate((keys, values)):
            stored = self._vectors[part, layer]
            if self._scales is None:
                stored.index_copy_(0, slots, vectors)
                continue
            wide = vectors.float()
            largest = _LARGEST[self._stored]
            scales = wide.abs().amax(-1).clamp_min(_TINY) / largest
            quotients = (wide / scales.unsqueeze(-1)).clamp(-largest, largest)
            packed = (quotients.round() if self._stored is torch.int8 else quotients).to(self._stored)
            # Bytes are bytes: torch indexes no float8 tensors everywhere.
            stored.view(torch.uint8).index_copy_(0, slots, packed.view(torch.uint8))
            self._scales[part, layer].index_copy_(0, slots, scales)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies what is at a slot to another slot, in all layers, one after the other."""
        for source, target in moves:
            self._vectors[:, :, target] = self._vectors[:, :, source]
            if self._scales is not None:
                self._scales[:, :, target] = self._scales[:, :, source]

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at slots of any shape S: two tensors [*S, kv heads, head_dim]."""
        return self._gather(0, layer, slots), self._gather(1, layer, slots)

    def _gather(self, part: int, layer: int, slots: torch.Tensor) -> torch.Tensor:
        stored = self._vectors[part, layer]
        if self._scales is None:
            return stored[slots]
        vectors = stored.view(torch.uint8)[slots].view(self._stored).float()
        return (vectors * self._scales[part, layer][slots].unsqueeze(-1)).to(self._dtype)
