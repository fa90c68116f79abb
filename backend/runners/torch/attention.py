"""Causal attention of one step's rows over a paged KV memory, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from backend.engine.model_runner import BLOCK_SIZE, MAX_TREE_TOKENS, StepInput, TreeRows
from backend.models.config import ModelConfig
from backend.runners.torch.kv_memory import KvMemory


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that attend in one call: the T rows of one sequence, or one row of each of S sequences."""

    rows: slice
    slots: torch.Tensor
    """[B, L] where the keys and values lie that the rows may see; B is 1 or S."""
    visible: torch.Tensor
    """bool [B, 1, T, L]; T is 1 for a batch of sequences."""


class StepAttention:
    """Attention of one step; what to gather is worked out once for each window size and shared by the layers."""

    def __init__(self, step: StepInput, config: ModelConfig) -> None:
        self.slots = torch.from_numpy(step.slot_mapping)
        self._config = config
        self._scale = config.attention_scale or config.head_dim**-0.5
        self._starts: list[int] = step.query_starts.tolist()
        self._positions = torch.from_numpy(step.positions).long()
        self._tree = step.tree
        self._tables = torch.from_numpy(step.block_tables).long()
        self._groups: dict[int | None, list[_Group]] = {}

    def __call__(self, layer: int, query: torch.Tensor, memory: KvMemory) -> torch.Tensor:
        """query [T, heads, head_dim] to the mixed values of the same shape."""
        window = self._config.window(layer)
        if window not in self._groups:
            self._groups[window] = self._grouped(window)
        return torch.cat([self._attend(layer, query, memory, group) for group in self._groups[window]])

    def _grouped(self, window: int | None) -> list[_Group]:
        if len(self._starts) - 1 == len(self._positions):
            return [self._batch(window)]
        return [self._sequence(window, index) for index in range(len(self._starts) - 1)]

    def _batch(self, window: int | None) -> _Group:
        """One row of each sequence. What a row sees ends at the row, so all are aligned at their ends."""
        longest = int(self._positions.max()) + 1
        span = min(longest, window or longest)
        offsets = self._positions.unsqueeze(1) + 1 - span + torch.arange(span)
        # Places before a sequence's start are hidden, and read its first token rather than a stranger's memory.
        return _Group(slice(None), self._slots_of(self._tables, offsets.clamp_min(0)), (offsets >= 0)[:, None, None])

    def _sequence(self, window: int | None, index: int) -> _Group:
        """Consecutive rows of one sequence."""
        rows = slice(self._starts[index], self._starts[index + 1])
        positions = self._positions[rows]
        if self._tree is not None and self._tree.masks[rows].any():
            return self._branching(window, index, self._tree)
        first = 0 if window is None else max(0, int(positions[0]) + 1 - window)
        offsets = torch.arange(first, int(positions[-1]) + 1)
        distance = positions.unsqueeze(1) - offsets
        visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return _Group(rows, self._slots_of(self._tables[index : index + 1], offsets[None]), visible[None, None])

    def _branching(self, window: int | None, index: int, tree: TreeRows) -> _Group:
        """Rows of one sequence of which the last ones are of a draft that branches."""
        rows = slice(self._starts[index], self._starts[index + 1])
        positions = self._positions[rows]
        places, seen, masks = (torch.from_numpy(part[rows]).long() for part in (tree.places, tree.seen, tree.masks))
        first = 0 if window is None else max(0, int(positions[0]) + 1 - window)
        offsets = torch.arange(first, int(places[-1]) + 1)
        own = offsets.clone()
        own[places - first] = positions
        beyond = offsets - seen.unsqueeze(1)
        visible = (beyond < 0) | (masks.unsqueeze(1) >> beyond.clamp(0, MAX_TREE_TOKENS) & 1).bool()
        if window is not None:
            visible &= positions.unsqueeze(1) - own < window
        return _Group(rows, self._slots_of(self._tables[index : index + 1], offsets[None]), visible[None, None])

    @staticmethod
    def _slots_of(tables: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return tables.gather(1, offsets // BLOCK_SIZE) * BLOCK_SIZE + offsets % BLOCK_SIZE

    def _attend(self, layer: int, query: torch.Tensor, memory: KvMemory, group: _Group) -> torch.Tensor:
        c = self._config
        keys, values = (part.transpose(1, 2) for part in memory.read(layer, group.slots))  # [B, kv heads, L, head_dim]
        # [B, heads, T, head_dim], where B * T is the number of rows and one of the two is 1.
        rows = query[group.rows].reshape(group.slots.shape[0], -1, c.num_heads, c.head_dim).transpose(1, 2)
        if c.attention_softcap is None:
            grouped = c.num_heads != c.num_kv_heads
            mixed = functional.scaled_dot_product_attention(
                rows, keys, values, attn_mask=group.visible, scale=self._scale, enable_gqa=grouped
            )
        else:
            mixed = self._capped(rows, keys, values, group.visible, c.attention_softcap)
        return mixed.transpose(1, 2).flatten(0, 1)

    def _capped(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, cap: float
    ) -> torch.Tensor:
        """Attention with scores soft-capped at ±cap, which torch's fused attention does not have."""
        batch, heads, count, head_dim = rows.shape
        grouped = rows.reshape(batch, keys.shape[1], heads // keys.shape[1], count, head_dim)
        scores = (grouped @ keys.unsqueeze(2).mT).float() * self._scale
        scores = (cap * torch.tanh(scores / cap)).masked_fill(~visible.unsqueeze(2), float("-inf"))
        return (scores.softmax(-1).to(values.dtype) @ values.unsqueeze(2)).flatten(1, 2)
