"""Causal attention of ragged chunks over the paged KV memory: several sequences, each from its own start.

A program computes a tile of consecutive rows of one sequence for one KV head, all query heads of the group together:

    tile row     0  1  2  3 | 4  5  6  7 | ...        group of 4
    query row    0  0  0  0   1  1  1  1              tile row // group
    query head   0  1  2  3   0  1  2  3              tile row %  group
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from backend.kernels.paged_decode import AttentionShape, PagedRows


@dataclass(frozen=True, slots=True)
class PagedTree:
    """`TreeRows` of a step on the device: int32 [T], int32 [T] and int64 [T]."""

    places: torch.Tensor
    seen: torch.Tensor
    masks: torch.Tensor


@triton.jit(do_not_specialize=["table_stride"])
def _prefill(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    block_tables: tl.tensor,
    row_sequence: tl.tensor,
    positions: tl.tensor,
    tree_places: tl.tensor,
    tree_seen: tl.tensor,
    tree_masks: tl.tensor,
    tiles: tl.tensor,
    output: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    TREE: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_row = tl.load(tiles + 2 * tile)
    count = tl.load(tiles + 2 * tile + 1)
    first_position = tl.load(positions + first_row)
    table = block_tables + tl.load(row_sequence + first_row).to(tl.int64) * table_stride

    members = tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_COLUMNS)
    offsets = members // GROUP
    heads = kv_head * GROUP + members % GROUP
    inside = (offsets[:, None] < count) & (columns[None, :] < HEAD_DIM)
    row = (first_row + offsets).to(tl.int64)
    q = tl.load(
        query + row[:, None] * query_stride + heads[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0
    )
    # Rows beyond the tile attend as its last row does, so that no softmax is empty.
    seen_until = first_position + tl.minimum(offsets, count - 1)
    end = first_position + count
    if TREE:
        member = first_row + tl.minimum(offsets, count - 1)
        seen_until = tl.load(positions + member)
        seen_before = tl.load(tree_seen + member)
        masks = tl.load(tree_masks + member)
        end = tl.load(tree_places + first_row) + count
        # A row of a draft may have a later position than those after it.
        first_position = tl.minimum(first_position, tl.load(tree_seen + first_row))

    begin = first_position * 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    mixed = tl.full([ROWS, HEAD_COLUMNS], 0.0, tl.float32)
    for start in range(begin, end, TILE):
        places = start + tl.arange(0, TILE)
        known = places < end
        if WINDOW > 0:
            # Blocks before the window have been freed: their contents must not be read.
            known = known & (places > first_position - WINDOW)
        blocks = tl.load(table + places // BLOCK, mask=known, other=0).to(tl.int64)
        at = (blocks * KV_HEADS + kv_head) * (BLOCK * HEAD_DIM) + (places % BLOCK) * HEAD_DIM
        k = tl.load(
            keys + at[None, :] + columns[:, None], mask=known[None, :] & (columns[:, None] < HEAD_DIM), other=0.0
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        seen = places[None, :] <= seen_until[:, None]
        if TREE:
            beyond = places[None, :] - seen_before[:, None]
            bits = masks[:, None] >> tl.minimum(tl.maximum(beyond, 0), 63).to(tl.int64)
            seen = (beyond < 0) | ((bits & 1) == 1)
        if WINDOW > 0:
            in_window = places[None, :] > seen_until[:, None] - WINDOW
            if TREE:  # their positions are at most so many before the row's as a window has, which is checked
                in_window = in_window | (beyond >= 0)
            seen = seen & in_window
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # With a window, the first tiles may be before all positions of a late row.
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp2(highest - finite)
        weights = tl.exp2(scores - finite[:, None])
        v = tl.load(
            values + at[:, None] + columns[None, :], mask=known[:, None] & (columns[None, :] < HEAD_DIM), other=0.0
        )
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = new_highest

    out = output + row[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + heads[:, None] * HEAD_DIM + columns[None, :]
    tl.store(out, (mixed / total[:, None]).to(output.dtype.element_ty), mask=inside)


def prefill_tile_rows(shape: AttentionShape, dtype: torch.dtype) -> int:
    """Most rows of one sequence in a program."""
    return max(1, _matrix_rows(shape, dtype) // shape.group)


def prefill_tiles(
    query_starts: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], tile_rows: int
) -> npt.NDArray[np.int32]:
    """Cuts the sequences of more than one row into tiles: int32 [tiles, 2] of (first row, rows), longest work first."""
    tiles = [
        (row, min(tile_rows, last - row))
        for first, last in pairwise(query_starts.tolist())
        if last - first > 1
        for row in range(first, last, tile_rows)
    ]
    tiles.sort(key=lambda tile: -int(positions[tile[0]]))
    return np.array(tiles, dtype=np.int32).reshape(-1, 2)


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: PagedRows,
    tiles: torch.Tensor,
    shape: AttentionShape,
    output: torch.Tensor,
    tree: PagedTree | None = None,
) -> None:
    """Attention of chunks; writes only the rows of ``output`` that the tiles name.

    Args:
        tree: what rows of drafts that branch see; windows then have to be longer than a draft is deep.
        query, keys, values: as in ``paged_decode``.
        tiles: int32 [tiles, 2], see ``prefill_tiles``.
        output: [T, heads * head_dim], contiguous, in the query's dtype.
    """
    small = query.dtype == torch.float32 or shape.head_dim > 128
    _prefill[(tiles.shape[0], shape.num_kv_heads)](
        query,
        keys,
        values,
        where.block_tables,
        where.row_sequence,
        where.positions,
        *((tiles, tiles, tiles) if tree is None else (tree.places, tree.seen, tree.masks)),
        tiles,
        output,
        shape.scale,
        shape.softcap,
        query.stride(0),
        where.block_tables.stride(0),
        KV_HEADS=shape.num_kv_heads,
        GROUP=shape.group,
        ROWS=_matrix_rows(shape, query.dtype),
        HEAD_DIM=shape.head_dim,
        HEAD_COLUMNS=triton.next_power_of_2(shape.head_dim),
        BLOCK=keys.shape[2],
        TILE=32 if small else 64,
        WINDOW=shape.window,
        SOFTCAP=shape.softcap > 0,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        TREE=tree is not None,
        num_warps=4 if small else 8,
        num_stages=2,
    )


def _matrix_rows(shape: AttentionShape, dtype: torch.dtype) -> int:
    # float32 products run outside the matrix units, from registers, which hold 16 rows.
    rows = 16 if dtype == torch.float32 else 64 if shape.head_dim > 128 else 128
    return max(rows, int(triton.next_power_of_2(shape.group)))
