"""Chooses the next token of every sequence from one matrix of logits.

Each row is treated on its own (its penalties, its filters, its random number), so what a seeded sequence draws does
not depend on what runs beside it. Order of the filters as in transformers: bias and penalties, what the answer's form
allows, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend.engine.host_sampler import choose_on_host
from backend.engine.sequence import SamplingParams, Sequence, TokenLogprobs


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
        if _is_adjusted(sequence):
            _adjust(logits[row], sequence)
    if logits.is_cuda:
        tokens: list[int] = draw(logits, sequences).tolist()
    else:
        tokens = choose_on_host(logits.numpy(), sequences)
    logprobs = {}
    if raw is not None:
        for index, row in enumerate(wanting):
            logprobs[row] = token_logprobs(raw[index], tokens[row], sequences[row].params)
    return [Sampled(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def draws_alone(sequence: Sequence) -> bool:
    """Whether the next token follows from the logits and the sequence's random number alone.

    Then it can be chosen before the tokens that precede it are known to the host.
    """
    return sequence.params.logprobs is None and not _is_adjusted(sequence)


@torch.inference_mode()
def draw(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Chooses a token for each sequence, all of which must draw alone; does not wait for a device to do it.

    Args:
        logits: float32 [len(sequences), vocab_size]; not changed.

    Returns:
        int64 [len(sequences)], where the logits are.
    """
    if logits.is_cuda:
        from backend.engine.device_sampler import choose_on_device

        return choose_on_device(logits, sequences)
    return torch.tensor(choose_on_host(logits.numpy(), sequences))


def token_logprobs(log_probabilities: torch.Tensor, token_id: int, params: SamplingParams) -> TokenLogprobs:
    """Report for one position; ``log_probabilities`` is [vocab_size]."""
    count = min(params.logprobs or 0, log_probabilities.shape[0])
    values, ids = torch.topk(log_probabilities, count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(log_probabilities[token_id]), top)


def _is_adjusted(sequence: Sequence) -> bool:
    params = sequence.params
    return params.has_penalties or bool(params.logit_bias) or sequence.constraint is not None


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
        biased, biases = sequence.logit_bias
        row[torch.from_numpy(biased).to(row.device)] += torch.from_numpy(biases).to(row.device)
    # Last, so that no bias brings back what is not allowed.
    if sequence.constraint is not None and (allowed := sequence.constraint.allowed()) is not None:
        row.masked_fill_(~allowed.to(row.device), -torch.inf)
