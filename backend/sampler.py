"""Chooses the next token of every sequence from one matrix of logits.

Each row is treated on its own (its penalties, its filters, its random number), so what a seeded sequence draws does
not depend on what runs beside it. Order of the filters as in transformers: bias and penalties, what the answer's form
allows, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from backend.sequence import SamplingParams, Sequence, TokenLogprobs

# Sorting a whole vocabulary costs milliseconds a row; nearly always the tokens that survive the filters are among
# the first few. Rows for which they are not (checked, never assumed) are sorted whole.
_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token; ``logprobs`` only if the sequence asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@torch.inference_mode()  # the logits may be an inference tensor, which nothing else may change
def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """Chooses one token for each sequence.

    Args:
        logits: float32 [len(sequences), vocab_size]; changed in place.
        sequences: what the rows belong to; their random generators advance by one number where they sample.
    """
    wanting = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    raw = torch.log_softmax(logits[wanting], dim=-1) if wanting else None
    for row, sequence in enumerate(sequences):
        _adjust(logits[row], sequence)
    tokens = _choose(logits, sequences).tolist()
    logprobs = {}
    if raw is not None:
        for index, row in enumerate(wanting):
            logprobs[row] = token_logprobs(raw[index], tokens[row], sequences[row].params)
    return [Sampled(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def draws_alone(sequence: Sequence) -> bool:
    """Whether the next token follows from the logits and the sequence's random number alone.

    Then it can be chosen before the tokens that precede it are known to the host.
    """
    params = sequence.params
    return not (params.has_penalties or params.logit_bias or params.logprobs is not None or sequence.constraint)


@torch.inference_mode()
def draw(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Chooses a token for each sequence, all of which must draw alone; does not wait for a device to do it.

    Args:
        logits: float32 [len(sequences), vocab_size]; not changed.

    Returns:
        int64 [len(sequences)], where the logits are.
    """
    return _choose(logits, sequences)


def token_logprobs(log_probabilities: torch.Tensor, token_id: int, params: SamplingParams) -> TokenLogprobs:
    """Report for one position; ``log_probabilities`` is [vocab_size]."""
    count = min(params.logprobs or 0, log_probabilities.shape[0])
    values, ids = torch.topk(log_probabilities, count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(log_probabilities[token_id]), top)


def _adjust(row: torch.Tensor, sequence: Sequence) -> None:
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
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    # Last, so that no bias brings back what is not allowed.
    if sequence.constraint is not None and (allowed := sequence.constraint.allowed()) is not None:
        row.masked_fill_(~allowed.to(row.device), -torch.inf)


def _choose(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    if logits.is_cuda:
        from backend.device_sampler import choose_on_device

        return choose_on_device(logits, sequences)
    tokens = torch.argmax(logits, dim=-1)
    drawing = [row for row, sequence in enumerate(sequences) if sequence.params.temperature > 0]
    if not drawing:
        return tokens
    chosen = [sequences[row] for row in drawing]
    # float64 holds every temperature that a request can name. The maximum is subtracted before the division, so the
    # smallest ones give 0 and -inf, which is greedy. Below normal numbers a processor may read 0 (flush to zero).
    temperatures = [max(sequence.params.temperature, sys.float_info.min) for sequence in chosen]
    scaled = logits[drawing].double()
    scaled -= scaled.max(dim=-1, keepdim=True).values
    scaled /= torch.tensor(temperatures, dtype=torch.float64).unsqueeze(1)
    probabilities = torch.softmax(scaled, dim=-1)
    uniform = torch.tensor([sequence.random.random() for sequence in chosen], dtype=torch.float64)
    tokens[drawing] = torch.tensor(_draw(probabilities, uniform, [sequence.params for sequence in chosen]))
    return tokens


def _draw(probabilities: torch.Tensor, uniform: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    """Draws one token from each row [R, V] by inverting its distribution at ``uniform`` [R]."""
    filtered = [index for index, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p]
    plain = [index for index in range(len(params)) if index not in set(filtered)]
    tokens = [0] * len(params)
    if plain:
        for index, token in zip(plain, _invert(probabilities[plain], uniform[plain]).tolist(), strict=True):
            tokens[index] = token
    if filtered:
        rows = probabilities[filtered]
        best, ids = torch.topk(rows, min(_CANDIDATES, rows.shape[-1]))
        masses = best.cumsum(dim=-1)
        for at, index in enumerate(filtered):
            p = params[index]
            if _covers(best[at], masses[at], p, rows.shape[-1]):
                candidates, candidate_ids = best[at], ids[at]
            else:
                candidates, candidate_ids = torch.sort(rows[at], descending=True, stable=True)
            kept = _filter(candidates, p)
            tokens[index] = int(candidate_ids[_invert(kept.unsqueeze(0), uniform[index : index + 1])])
    return tokens


def _covers(best: torch.Tensor, masses: torch.Tensor, params: SamplingParams, vocab_size: int) -> bool:
    """Whether every token that the filters keep is among the best ones."""
    return bool(
        best.shape[0] == vocab_size
        or 0 < params.top_k <= best.shape[0]
        or (params.top_k == 0 and params.top_p < 1 and masses[-1] >= params.top_p)
        or (params.min_p and best[-1] < params.min_p * best[0])
    )


def _filter(descending: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Zeroes what top-k, top-p (arXiv 1904.09751) and min-p (arXiv 2407.01082) leave out; never the first."""
    kept = descending[: params.top_k] if params.top_k else descending
    if params.top_p < 1:
        # A token stays if the mass before it has not reached top_p yet; the mass is that of what top-k left.
        before = kept.cumsum(dim=-1) - kept
        total = kept.sum() if params.top_k else 1.0
        kept = kept[: max(1, int((before < params.top_p * total).sum()))]
    if params.min_p:
        kept = kept[: max(1, int((kept >= params.min_p * kept[0]).sum()))]
    return kept


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First index at which the running sum exceeds ``uniform`` of the total; weights [R, K], uniform [R]."""
    running = weights.cumsum(dim=-1)
    threshold = (uniform * running[:, -1]).unsqueeze(1)
    index = torch.searchsorted(running, threshold, right=True).squeeze(1)
    return index.clamp(max=weights.shape[-1] - 1)
