"""Attention of one new token per sequence over the paged KV memory, each sequence split over several programs.

A split keeps a running maximum and sum (online softmax, arXiv 1805.02867) over its part of the context and writes its
result with a log-sum-exp (flash-decoding); ``reduce_splits`` joins the parts. All query heads of a KV head are rows of
one matrix product, so keys and values are read once for the whole group.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention parameters of one layer.

    ``window``: positions a query attends to, itself included; 0: all before it. ``softcap``: scores become
    softcap * tanh(score / softcap); 0: no cap.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Sequences and positions of the rows of a step. All int32, on the device.

    ``block_tables`` [S, B], contiguous; ``row_sequence`` [T]: row of the block table; ``positions`` [T].
    """

    block_tables: torch.Tensor
    row_sequence: torch.Tensor
    positions: torch.Tensor


@triton.jit(do_not_specialize=["table_stride"])
def _decode_split(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    block_tables: tl.tensor,
    row_sequence: tl.tensor,
    positions: tl.tensor,
    rows: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(rows + index)
    length = tl.load(positions + row) + 1
    table = block_tables + tl.load(row_sequence + row).to(tl.int64) * table_stride

    visible_from = length * 0
    if WINDOW > 0:
        visible_from = tl.maximum(length - WINDOW, 0)
    aligned = visible_from // TILE * TILE
    tiles = (length - aligned + TILE * SPLITS - 1) // (TILE * SPLITS)
    begin = aligned + split * tiles * TILE
    end = tl.minimum(begin + tiles * TILE, length)

    members = tl.arange(0, GROUP_ROWS)
    columns = tl.arange(0, HEAD_COLUMNS)
    heads = kv_head * GROUP + members
    inside = (members[:, None] < GROUP) & (columns[None, :] < HEAD_DIM)
    q = tl.load(
        query + row.to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0
    )

    highest = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.full([GROUP_ROWS], 0.0, tl.float32)
    mixed = tl.full([GROUP_ROWS, HEAD_COLUMNS], 0.0, tl.float32)
    for start in range(begin, end, TILE):
        places = start + tl.arange(0, TILE)
        seen = (places < end) & (places >= visible_from)
        blocks = tl.load(table + places // BLOCK, mask=places < end, other=0).to(tl.int64)
        at = (blocks * KV_HEADS + kv_head) * (BLOCK * HEAD_DIM) + (places % BLOCK) * HEAD_DIM
        k = tl.load(
            keys + at[None, :] + columns[:, None], mask=seen[None, :] & (columns[:, None] < HEAD_DIM), other=0.0
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if SOFTCAP:
            # tanh by the logistic function: not every version of Triton has tanh.
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        # Base 2: the hardware has exp2, and the factor costs nothing here.
        scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
        # Every tile before ``end`` holds a visible place, so the new maximum is finite.
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        v = tl.load(
            values + at[:, None] + columns[None, :], mask=seen[:, None] & (columns[None, :] < HEAD_DIM), other=0.0
        )
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = new_highest

    some = total > 0
    divisor = tl.where(some, total, 1.0)
    place = ((index * KV_HEADS * GROUP + heads) * SPLITS + split).to(tl.int64)
    tl.store(
        partial + place[:, None] * HEAD_DIM + columns[None, :],
        (mixed / divisor[:, None]).to(partial.dtype.element_ty),
        mask=inside,
    )
    if SPLITS > 1:
        # A split without work has weight zero.
        log_sum = tl.where(some, highest + tl.log2(divisor), float("-inf"))
        tl.store(log_sums + place, log_sum, mask=members < GROUP)


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: PagedRows,
    rows: torch.Tensor,
    shape: AttentionShape,
    splits: int,
) -> torch.Tensor:
    """Attention of single-token rows.

    Args:
        query: [T, any width ≥ heads * head_dim], heads first, already rotated; rows are ``query.stride(0)`` apart.
        keys, values: [blocks, kv heads, block_size, head_dim], contiguous, the rows' own included.
        rows: int32 [R], the rows to compute.
        splits: programs over which one context is spread, a power of two.

    Returns:
        [R, heads * head_dim] in the query's dtype.
    """
    count, heads, dim = rows.shape[0], shape.num_heads, shape.head_dim
    output = torch.empty(count, heads * dim, dtype=query.dtype, device=query.device)
    partial, log_sums = output, output
    if splits > 1:
        partial = torch.empty(count, heads, splits, dim, dtype=torch.float32, device=query.device)
        log_sums = torch.empty(count, heads, splits, dtype=torch.float32, device=query.device)
    small = query.dtype == torch.float32 or dim > 128
    _decode_split[(count, shape.num_kv_heads, splits)](
        query,
        keys,
        values,
        where.block_tables,
        where.row_sequence,
        where.positions,
        rows,
        partial,
        log_sums,
        shape.scale,
        shape.softcap,
        query.stride(0),
        where.block_tables.stride(0),
        KV_HEADS=shape.num_kv_heads,
        GROUP=shape.group,
        GROUP_ROWS=max(16, triton.next_power_of_2(shape.group)),
        HEAD_DIM=dim,
        HEAD_COLUMNS=triton.next_power_of_2(dim),
        BLOCK=keys.shape[2],
        TILE=32 if small else 64,
        SPLITS=splits,
        WINDOW=shape.window,
        SOFTCAP=shape.softcap > 0,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        reduce_splits(partial, log_sums, output)
    return output


@triton.jit
def _reduce(
    partial: tl.tensor,
    log_sums: tl.tensor,
    output: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    item = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, HEAD_COLUMNS)
    logs = tl.load(log_sums + item * SPLITS + splits)
    # The first split always has work, so the maximum is finite.
    weights = tl.exp2(logs - tl.max(logs, 0))
    weights = weights / tl.sum(weights, 0)
    at = (item * SPLITS + splits[:, None]) * HEAD_DIM + columns[None, :]
    parts = tl.load(partial + at, mask=columns[None, :] < HEAD_DIM, other=0.0)
    joined = tl.sum(parts * weights[:, None], 0)
    tl.store(output + item * HEAD_DIM + columns, joined.to(output.dtype.element_ty), mask=columns < HEAD_DIM)


def reduce_splits(partial: torch.Tensor, log_sums: torch.Tensor, output: torch.Tensor) -> None:
    """Writes ``output`` [R, heads * head_dim] from ``partial`` float32 [R, heads, splits, head_dim].

    ``log_sums`` float32 [R, heads, splits] is log2 of each part's sum of exponentials; -inf: the part is empty.
    """
    rows, heads, splits, dim = partial.shape
    _reduce[(rows * heads,)](
        partial,
        log_sums,
        output,
        HEAD_DIM=dim,
        HEAD_COLUMNS=triton.next_power_of_2(dim),
        SPLITS=splits,
        num_warps=4 if splits * dim >= 2048 else 1,
    )
