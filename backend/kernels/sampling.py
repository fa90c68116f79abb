"""Chooses one token per row on the device, without sorting.

The smallest logit that top-k or top-p keeps is found by bisection over the bit patterns of float32, which have the
order of the numbers. The token is then drawn by inverting the distribution at one uniform number, which a
counter-based generator (Philox, SC11) makes from the row's own seed and counter: a draw depends only on its row.
"""

import torch
import triton
import triton.language as tl

_COLUMNS = 4096


@triton.jit
def _ordered(logits: tl.tensor) -> tl.tensor:
    """int32 with the order of the float32 it is made from."""
    # -0.0 + 0.0 is 0.0: equal numbers get equal keys.
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _mass_above(
    row: tl.tensor,
    vocabulary: tl.tensor,
    key: tl.tensor,
    floor: tl.tensor,
    highest: tl.tensor,
    inverse: tl.tensor,
    COUNTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Weight, or number, of the tokens whose key is above ``key`` and not below ``floor``."""
    sums = tl.full([COLUMNS], 0.0, tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        ids = start + tl.arange(0, COLUMNS)
        logits = tl.load(row + ids, mask=ids < vocabulary, other=float("-inf"))
        keys = _ordered(logits).to(tl.int64)
        kept = (ids < vocabulary) & (keys > key) & (keys >= floor)
        if COUNTS:
            sums += kept.to(tl.float32)
        else:
            sums += tl.where(kept, tl.exp((logits - highest) * inverse), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _lowest_kept(
    row: tl.tensor,
    vocabulary: tl.tensor,
    limit: tl.tensor,
    floor: tl.tensor,
    highest: tl.tensor,
    inverse: tl.tensor,
    COUNTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Smallest key such that the mass above it is under ``limit``."""
    low = floor
    high = _ordered(highest).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        if _mass_above(row, vocabulary, middle, floor, highest, inverse, COUNTS, COLUMNS) < limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _sample(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    counters: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    best_ids = tl.full([COLUMNS], 0, tl.int32)
    broken = tl.full([COLUMNS], 0, tl.int32)
    for start in range(0, vocabulary, COLUMNS):
        ids = start + tl.arange(0, COLUMNS)
        values = tl.load(row + ids, mask=ids < vocabulary, other=float("-inf"))
        broken += (values != values).to(tl.int32)
        better = values > best
        best = tl.where(better, values, best)
        best_ids = tl.where(better, ids, best_ids)
    highest = tl.max(best, 0)
    # Of equal logits the first token is chosen, in any lane.
    token = tl.min(tl.where(best == highest, best_ids, 2147483647), 0)
    temperature = tl.load(temperatures + index)

    if (temperature > 0) & (tl.sum(broken, 0) == 0):
        # The smallest temperatures are greedy; their inverse must stay finite.
        inverse = 1.0 / tl.maximum(temperature, 1e-30)
        floor = tl.full([], -2147483648, tl.int64)
        top_k = tl.load(top_ks + index)
        if (top_k > 0) & (top_k < vocabulary):
            floor = _lowest_kept(row, vocabulary, top_k.to(tl.float32), floor, highest, inverse, True, COLUMNS)
        top_p = tl.load(top_ps + index)
        if top_p < 1:
            total = _mass_above(row, vocabulary, floor - 1, floor, highest, inverse, False, COLUMNS)
            floor = _lowest_kept(row, vocabulary, top_p * total, floor, highest, inverse, False, COLUMNS)
        least = tl.load(min_ps + index)

        total = tl.full([], 0.0, tl.float32)
        for start in range(0, vocabulary, COLUMNS):
            ids = start + tl.arange(0, COLUMNS)
            values = tl.load(row + ids, mask=ids < vocabulary, other=float("-inf"))
            weights = tl.exp((values - highest) * inverse)
            kept = (ids < vocabulary) & (_ordered(values).to(tl.int64) >= floor) & (weights >= least)
            total += tl.sum(tl.where(kept, weights, 0.0), 0)

        target = tl.rand(tl.load(seeds + index), tl.load(counters + index)) * total
        before = tl.full([], 0.0, tl.float32)
        found = tl.full([], 0, tl.int32)
        for start in range(0, vocabulary, COLUMNS):
            ids = start + tl.arange(0, COLUMNS)
            values = tl.load(row + ids, mask=ids < vocabulary, other=float("-inf"))
            weights = tl.exp((values - highest) * inverse)
            kept = (ids < vocabulary) & (_ordered(values).to(tl.int64) >= floor) & (weights >= least)
            weights = tl.where(kept, weights, 0.0)
            mass = tl.sum(weights, 0)
            if (found == 0) & (before + mass > target):
                reached = kept & (before + tl.cumsum(weights, 0) > target)
                first = tl.min(tl.where(reached, ids, 2147483647), 0)
                # Rounding may leave the running sum below the tile's own: then the tile's last token is chosen.
                last = tl.max(tl.where(kept, ids, 0), 0)
                token = tl.minimum(first, last)
                found = found + 1
            before += mass

    tl.store(tokens + index, tl.where(tl.sum(broken, 0) > 0, -1, token).to(tl.int64))


def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    """Chooses a token for each row; order of the filters: temperature, top-k, top-p, min-p.

    Tokens that tie with the last one kept by top-k or top-p are kept too.

    Args:
        logits: float32 [R, vocab_size], rows contiguous; not changed.
        temperatures: float32 [R]; 0: the most likely token, the first of equal ones.
        top_ks: int32 [R]; 0: no limit.
        top_ps, min_ps: float32 [R]; 1 and 0: no limit.
        seeds: int64 [R].
        counters: int32 [R]: the same seed and counter give the same number, others independent ones.

    Returns:
        int64 [R]; -1 for a row with a logit that is not a number.
    """
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _sample[(rows,)](
        logits,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        seeds,
        counters,
        tokens,
        logits.stride(0),
        vocabulary,
        COLUMNS=_COLUMNS,
        num_warps=8,
    )
    return tokens
