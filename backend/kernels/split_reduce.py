"""Joins the parts that the splits of one context computed: a mean weighted by each part's share of the softmax."""

import torch
import triton
import triton.language as tl


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
