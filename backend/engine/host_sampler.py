"""The choice of tokens where the logits are in the host's memory.

numpy's loops are vectorised where torch's are not (a row's argmax is 10 times as fast), and drawing is half of a step
if it is done without care: nothing here sorts a vocabulary or adds it up in a chain unless a filter leaves all of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backend.engine.sequence import SamplingParams, Sequence

Floats = npt.NDArray[np.float32]

# Weights are relative to the best token's. Candidates for a filter are those above the first of these floors that
# leaves enough of them (checked, never assumed): mostly a few dozen.
_FLOORS = (1e-2, 1e-4, 1e-6, 0.0)
# Below, a float32 quotient of two logits' difference could be 0/0; there every temperature is greedy anyway.
_LEAST_TEMPERATURE = 1e-30
_BLOCK = 256


def choose_on_host(logits: Floats, sequences: list[Sequence]) -> list[int]:
    """One token for each row, under the temperature and the filters of its sequence.

    Each row is drawn on its own, with one number of its sequence's generator.

    Args:
        logits: [len(sequences), vocab_size]; not changed.
    """
    tokens: list[int] = logits.argmax(axis=-1).tolist()
    for row, sequence in enumerate(sequences):
        if sequence.params.temperature > 0:
            tokens[row] = _draw(logits[row], sequence.params, sequence.random.random())
    return tokens


def _draw(row: Floats, params: SamplingParams, uniform: float) -> int:
    # A difference may overflow to minus infinity, whose weight is 0; what is not a number is the caller's to find.
    with np.errstate(over="ignore", invalid="ignore"):
        weights = (row - row.max()) / np.float32(max(params.temperature, _LEAST_TEMPERATURE))
    np.exp(weights, out=weights)
    if not (params.top_k or params.top_p < 1 or params.min_p):
        return _invert(weights, uniform)
    mass = float(weights.sum())
    candidates = _candidates(weights, mass, params)
    return int(candidates[_invert(_filter(weights[candidates], mass, params), uniform)])


def _candidates(weights: Floats, mass: float, params: SamplingParams) -> npt.NDArray[np.intp]:
    """Tokens by falling weight, at least those that the filters keep; among equals the smaller id first."""
    for floor in _FLOORS:
        above = np.flatnonzero(~(weights < floor))  # with what is not a number
        if params.top_k:
            enough = above.size >= params.top_k
        else:
            enough = params.top_p < 1 and float(weights[above].sum()) >= params.top_p * mass
        # What min-p leaves out still counts in the mass that top-p is a share of, where that is the mass of the top k.
        min_p_decides = params.top_p >= 1 or not params.top_k
        if enough or (min_p_decides and params.min_p and floor <= params.min_p):
            break
    found: npt.NDArray[np.intp] = above[np.argsort(-weights[above], kind="stable")]
    return found


def _filter(falling: Floats, mass: float, params: SamplingParams) -> Floats:
    """Cuts off what top-k, top-p (arXiv 1904.09751) and min-p (arXiv 2407.01082) leave out; never the first.

    Args:
        falling: weights of the candidates.
        mass: the weight of all tokens, candidates or not.
    """
    kept = falling[: params.top_k] if params.top_k else falling
    if params.top_p < 1:
        # A token stays if the mass before it has not reached top_p yet; the mass is that of what top-k left.
        running = kept.cumsum(dtype=np.float64)
        whole = running[-1] if params.top_k else mass
        kept = kept[: 1 + int(np.searchsorted(running[:-1], params.top_p * whole))]
    if params.min_p:
        kept = kept[: max(1, int((kept >= params.min_p * kept[0]).sum()))]
    return kept


def _invert(weights: Floats, uniform: float) -> int:
    """The first index at which the running sum exceeds ``uniform`` of the total, and never one without weight.

    Blocks first, then the tokens of one block: a running sum of them all would be one long chain of additions.
    """
    sums = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK)).astype(np.float64)
    ends = sums.cumsum()
    block = _exceeding(ends, sums, uniform * ends[-1])
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    return block * _BLOCK + _exceeding(
        inside.cumsum(dtype=np.float64), inside, uniform * ends[-1] - (ends[block] - sums[block])
    )


def _exceeding(running: npt.NDArray[np.float64], weights: npt.NDArray[np.floating], threshold: float) -> int:
    index = int(np.searchsorted(running, threshold, side="right"))
    if index < running.size:
        return index
    # Sums that were rounded in another order can end below the threshold; then it is the last one with weight.
    return int(max(np.flatnonzero(weights), default=0))
