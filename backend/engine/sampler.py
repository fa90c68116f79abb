"""Chooses the next token of every sequence from one matrix of logits.

Each row is treated on its own (its penalties, its filters, its random number), so what a seeded sequence draws does
not depend on what runs beside it. Order of the filters as in transformers: bias and penalties, what the output
constraint allows, temperature, top-k, top-p, min-p.

Host sampling uses NumPy: its loops are vectorised where torch's are not (the argmax of a row is 10 times as fast).
Nothing sorts a vocabulary, or adds it up in a chain, unless a filter leaves all of it. Device sampling never waits for
the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from backend.engine.sequence import SamplingParams, Sequence, TokenLogprobs
from backend.kernels.transfer import to_device


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One chosen token; ``logprobs`` only if the sequence asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@torch.inference_mode()  # the logits may be an inference tensor, which nothing else may change
def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    """Chooses one token for each sequence.

    Args:
        logits: float32 [len(sequences), vocab_size]; changed in place.
        sequences: what the rows belong to; their random generators advance by one number where they sample.
    """
    wanting = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    raw = torch.log_softmax(logits[wanting], dim=-1) if wanting else None
    for row, sequence in enumerate(sequences):
        if _has_logits_processors(sequence):
            _process_logits(logits[row], sequence)
    if logits.is_cuda:
        tokens: list[int] = sample_independently(logits, sequences).tolist()
    else:
        tokens = sample_on_host(logits.numpy(), sequences)
    logprobs = {}
    if raw is not None:
        for index, row in enumerate(wanting):
            logprobs[row] = token_logprobs(raw[index], tokens[row], sequences[row].params.logprobs)
    return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]


@torch.inference_mode()
def accept_or_sample(
    logits: torch.Tensor, sequence: Sequence, proposed: int, drawn_from: npt.NDArray[np.float32]
) -> SampledToken:
    """Accepts a token that was drawn from another distribution, or draws one in its place; for a temperature above 0.

    The result is distributed as the sequence's own samples are (arXiv 2211.17192, algorithm 1): accepted with
    probability min(1, p / q), else drawn from what of p is above q. Takes one number of the sequence's generator.

    Args:
        logits: float32 [1, vocab_size]; changed in place.
        drawn_from: q, [vocab_size].
    """
    raw = torch.log_softmax(logits[0], dim=-1) if sequence.params.logprobs is not None else None
    if _has_logits_processors(sequence):
        _process_logits(logits[0], sequence)
    target = distribution(logits[0].cpu().numpy(), sequence.params)
    uniform = sequence.random.random()
    acceptance = min(1.0, float(target[proposed]) / float(drawn_from[proposed]))
    token = proposed
    if uniform >= acceptance:
        # Given that it was refused, this is uniform again.
        again = (uniform - acceptance) / (1.0 - acceptance)
        token = draw_from(np.maximum(target - drawn_from, 0.0), again)
    logprobs = None if raw is None else token_logprobs(raw, token, sequence.params.logprobs)
    return SampledToken(token, logprobs)


def can_sample_independently(sequence: Sequence) -> bool:
    """Whether the next token follows from the logits and the sequence's random number alone.

    Then it can be chosen before the tokens that precede it are known to the host.
    """
    return sequence.params.logprobs is None and not _has_logits_processors(sequence)


@torch.inference_mode()
def sample_independently(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Chooses a token for each sequence, all of which must draw alone; does not wait for a device to do it.

    Args:
        logits: float32 [len(sequences), vocab_size]; not changed.

    Returns:
        int64 [len(sequences)], where the logits are.
    """
    if logits.is_cuda:
        return sample_on_device(logits, sequences)
    return torch.tensor(sample_on_host(logits.numpy(), sequences))


def token_logprobs(log_probabilities: torch.Tensor, token_id: int, alternatives: int | None) -> TokenLogprobs:
    """Report for one position; ``log_probabilities`` is [vocab_size]."""
    count = min(alternatives or 0, log_probabilities.shape[0])
    values, ids = torch.topk(log_probabilities, count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(log_probabilities[token_id]), top)


def _has_logits_processors(sequence: Sequence) -> bool:
    params = sequence.params
    return params.has_penalties or bool(params.logit_bias) or sequence.constraint is not None or not sequence.may_end


def _process_logits(row: torch.Tensor, sequence: Sequence) -> None:
    """Applies penalties, biases and the constraint to one row in place.

    Repetition (CTRL, arXiv 1909.05858) looks at prompt and answer, presence and frequency at the answer alone.
    """
    params = sequence.params
    if params.has_penalties:
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(sequence.tokens)), device=row.device)
            values = row[seen]
            row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if sequence.output_counts:
            ids = torch.tensor(list(sequence.output_counts), device=row.device)
            counts = torch.tensor(list(sequence.output_counts.values()), dtype=row.dtype, device=row.device)
            row[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        biased, biases = sequence.logit_bias
        row[torch.from_numpy(biased).to(row.device)] += torch.from_numpy(biases).to(row.device)
    # Last, so that no bias brings back what is not allowed.
    if not sequence.may_end:
        row[sequence.end_tokens] = -torch.inf
    if sequence.constraint is not None and (allowed := sequence.constraint.allowed()) is not None:
        row.masked_fill_(~allowed.to(row.device), -torch.inf)


Floats = npt.NDArray[np.float32]

# Weights are relative to the best token's. Candidates for a filter are those above the first of these floors that
# leaves enough of them (checked, never assumed): mostly a few dozen.
_FLOORS = (1e-2, 1e-4, 1e-6, 0.0)
# Below, a float32 quotient of two logits' difference could be 0/0; there every temperature is greedy anyway.
_MIN_TEMPERATURE = 1e-30
_BLOCK = 256


def sample_on_host(logits: Floats, sequences: list[Sequence]) -> list[int]:
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


def distribution(row: Floats, params: SamplingParams) -> Floats:
    """The probability of each token under the temperature and the filters; float32, as ``row`` [vocab_size].

    Args:
        params: with a temperature above 0.
    """
    weights = _weights(row, params)
    if _filters(params):
        mass = float(weights.sum())
        candidates = _candidates(weights, mass, params)
        kept = _filter(weights[candidates], mass, params)
        weights = np.zeros_like(weights)
        weights[candidates[: kept.size]] = kept
    shares: Floats = weights / np.float32(weights.sum(dtype=np.float64))
    return shares


def _draw(row: Floats, params: SamplingParams, uniform: float) -> int:
    weights = _weights(row, params)
    if not _filters(params):
        return draw_from(weights, uniform)
    mass = float(weights.sum())
    candidates = _candidates(weights, mass, params)
    return int(candidates[draw_from(_filter(weights[candidates], mass, params), uniform)])


def _weights(row: Floats, params: SamplingParams) -> Floats:
    """Of each token, relative to the best one's, before the filters."""
    # A difference may overflow to minus infinity, whose weight is 0; what is not a number is the caller's to find.
    with np.errstate(over="ignore", invalid="ignore"):
        weights: Floats = (row - row.max()) / np.float32(max(params.temperature, _MIN_TEMPERATURE))
    return np.exp(weights, out=weights)


def _filters(params: SamplingParams) -> bool:
    return bool(params.top_k or params.top_p < 1 or params.min_p)


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


def draw_from(weights: Floats, uniform: float) -> int:
    """The first index at which the running sum exceeds ``uniform`` of the total, and never one without weight.

    Blocks first, then the tokens of one block: a running sum of them all would be one long chain of additions.
    """
    sums = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK)).astype(np.float64)
    ends = sums.cumsum()
    block = _first_above(ends, sums, uniform * ends[-1])
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    return block * _BLOCK + _first_above(
        inside.cumsum(dtype=np.float64), inside, uniform * ends[-1] - (ends[block] - sums[block])
    )


def _first_above(running: npt.NDArray[np.float64], weights: npt.NDArray[np.floating], threshold: float) -> int:
    index = int(np.searchsorted(running, threshold, side="right"))
    if index < running.size:
        return index
    # Sums that were rounded in another order can end below the threshold; then it is the last one with weight.
    return int(max(np.flatnonzero(weights), default=0))


_SEED_BITS = 63


def sample_on_device(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """One token for each row, under the temperature and the filters of its sequence.

    The generator of each sequence that samples gives one seed, and the device makes the uniform number from it: what
    a sequence draws does not depend on what runs beside it.

    Args:
        logits: float32 [len(sequences), vocab_size], rows contiguous.

    Returns:
        int64 [len(sequences)], on the device.
    """
    from backend.kernels.sampling import sample_tokens  # needs Triton, which only CUDA builds bring

    params = [sequence.params for sequence in sequences]
    if not any(p.temperature > 0 for p in params):
        return torch.argmax(logits, dim=-1)
    count, vocabulary = logits.shape
    # Four arrays of numbers and one of seeds in one copy. Each begins at 16 bytes, or the kernel would be compiled
    # again for other alignments.
    width = -(-count // 4) * 4
    packed = np.zeros((6, width), dtype=np.int32)
    packed[:3].view(np.float32)[:, :count] = np.array([(p.temperature, p.top_p, p.min_p) for p in params]).T
    packed[3, :count] = [min(p.top_k, vocabulary) for p in params]
    seeds = [s.random.getrandbits(_SEED_BITS) if s.params.temperature > 0 else 0 for s in sequences]
    packed[4:].reshape(-1).view(np.int64)[:count] = seeds
    sent = to_device(packed, logits.device)
    temperatures, top_ps, min_ps = sent[:3].view(torch.float32)
    counters = torch.zeros(count, dtype=torch.int32, device=logits.device)
    return sample_tokens(
        logits, temperatures, sent[3], top_ps, min_ps, sent[4:].reshape(-1).view(torch.int64), counters
    )
