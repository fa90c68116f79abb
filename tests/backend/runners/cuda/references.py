"""Formulas in plain torch that every kernel is compared with, in the interpreter and on a device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from backend.engine.model_runner import BLOCK_SIZE
from backend.kernels.paged_decode import AttentionShape, PagedRows


@dataclass(frozen=True)
class PagedCase:
    """Random queries and a random paged KV memory with chunks of some sequences in it."""

    shape: AttentionShape
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    where: PagedRows
    query_starts: npt.NDArray[np.int32]

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """int32 [T], on the host."""
        found: npt.NDArray[np.int32] = self.where.positions.cpu().numpy()
        return found


def paged_case(
    shape: AttentionShape,
    chunks: list[tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
    device: str = "cpu",
) -> PagedCase:
    """``chunks``: (first position, rows) of each sequence. What no sequence has written is NaN, to be never read."""
    random = torch.Generator().manual_seed(seed)
    lengths = [start + count for start, count in chunks]
    widths = [-(-length // BLOCK_SIZE) for length in lengths]
    order = torch.randperm(sum(widths) + 3, generator=random).to(torch.int32)
    tables = torch.zeros(len(chunks), max(widths), dtype=torch.int32)
    memory = (len(order), shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    keys, values = torch.full(memory, float("nan")), torch.full(memory, float("nan"))
    taken = 0
    for index, (width, length) in enumerate(zip(widths, lengths, strict=True)):
        tables[index, :width] = order[taken : taken + width]
        taken += width
        places = torch.arange(length)
        blocks, offsets = tables[index, places // BLOCK_SIZE].long(), places % BLOCK_SIZE
        for store in (keys, values):
            store[blocks, :, offsets] = torch.randn(length, shape.num_kv_heads, shape.head_dim, generator=random)
    starts = np.cumsum([0, *(count for _, count in chunks)]).astype(np.int32)
    rows = np.repeat(np.arange(len(chunks)), np.diff(starts))
    positions = np.concatenate([np.arange(start, start + count) for start, count in chunks])
    # Wider than the queries alone, as the fused projection is.
    width = (shape.num_heads + 2) * shape.head_dim
    query = torch.randn(len(positions), width, generator=random)
    return PagedCase(
        shape,
        query.to(device, dtype),
        keys.to(device, dtype),
        values.to(device, dtype),
        PagedRows(
            tables.to(device),
            torch.from_numpy(rows.astype(np.int32)).to(device),
            torch.from_numpy(positions.astype(np.int32)).to(device),
        ),
        starts,
    )


def attention_reference(case: PagedCase) -> torch.Tensor:
    """Gathers every context and applies the formula in float64; [T, heads * head_dim]."""
    shape, parts = case.shape, []
    for index, (first, last) in enumerate(pairwise(case.query_starts.tolist())):
        positions = case.where.positions[first:last].long()
        places = torch.arange(int(positions[-1]) + 1, device=positions.device)
        blocks = case.where.block_tables[index, places // BLOCK_SIZE].long()
        k = case.keys[blocks, :, places % BLOCK_SIZE].double().repeat_interleave(shape.group, dim=1)
        v = case.values[blocks, :, places % BLOCK_SIZE].double().repeat_interleave(shape.group, dim=1)
        q = case.query[first:last, : shape.num_heads * shape.head_dim].double()
        q = q.view(last - first, shape.num_heads, shape.head_dim)
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.scale
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        seen = places <= positions.unsqueeze(1)
        if shape.window:
            seen = seen & (places > positions.unsqueeze(1) - shape.window)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
    return torch.cat(parts)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotation_reference(x: torch.Tensor, rope: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates [T, heads, head_dim] by the angles of ``rope`` float32 [positions, head_dim], in float64."""
    cosines, sines = rope[positions.long()].double().unsqueeze(1).chunk(2, dim=-1)
    low, high = x.double().chunk(2, dim=-1)
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)


def kept_tokens(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """bool [V]: the tokens of one row that the filters keep, ties with the last one included."""
    scaled = logits.double() / temperature
    if 0 < top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], float("-inf"))
    probabilities = scaled.softmax(-1)
    descending = probabilities.sort(descending=True).values
    before = descending.cumsum(-1) - descending
    least = descending[before < top_p][-1] if top_p < 1 else descending.new_zeros(())
    return (probabilities > 0) & (probabilities >= least) & (probabilities >= min_p * descending[0])


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """‖got - expected‖ / ‖expected‖; infinite where something is not a number."""
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    return error if np.isfinite(error) else float("inf")


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest relative error by dtype; inputs are rounded before the reference sees them."""
