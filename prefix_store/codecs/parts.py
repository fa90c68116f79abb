"""The keys and the values of a block, in one order whatever its layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes

if TYPE_CHECKING:
    from torch import Tensor


def keys_and_values(block: Bytes, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """Views [layers, kv heads, tokens, dimensions] of a block's bytes, in the layout's dtype.

    The layout must say its axes.
    """
    import torch

    # NumPy has no bfloat16, so the bytes become numbers on torch's side.
    numbers = torch.from_numpy(block).view(getattr(torch, layout.dtype)).view(layout.shape)
    part = layout.axes.index("p")
    keys, values = numbers.select(part, 0), numbers.select(part, 1)
    if layout.keys_transposed:
        keys = keys.view(*keys.shape[:-2], layout.size("d"), layout.size("t")).transpose(-1, -2)
    order = [layout.axes.replace("p", "").index(axis) for axis in "lhtd"]
    return keys.permute(order), values.permute(order)
