"""A text, scored: the figures that a report gives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backend.engine.model_runner import ModelRunner
from backend.errors import ModelError
from backend.evaluation.scores import Scores, score
from backend.evaluation.windows import windows

Scored = Callable[[int, int, float], None]
"""Told after each window: tokens scored, tokens in all, mean surprise so far."""

_MOST_SURPRISE = 700.0
"""In nats: beyond it perplexity is no number any more."""


@dataclass(frozen=True, slots=True)
class Loss:
    """How far a model is from its reference, over the same tokens."""

    reference_perplexity: float
    kl_mean: float
    """Nats per token, from the reference's distribution to the model's."""
    kl_p99: float
    """Of all tokens, one in a hundred is further off."""
    top1_agreement: float
    """Share of the tokens for which both have the same first choice."""

    @classmethod
    def of(cls, scores: Scores, reference: Scores) -> Loss:
        """From the scores of a model and of its reference."""
        return cls(
            perplexity(reference),
            float(scores.divergence.mean(dtype=np.float64)),
            float(np.quantile(scores.divergence, 0.99)),
            float(scores.agrees.mean()),
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of one model on one text."""

    tokens: int
    """That were scored: all of the text but the first."""
    perplexity: float
    loss: Loss | None
    """None: there was nothing to compare with."""
    seconds: float


def evaluate(
    tokens: npt.NDArray[np.int32],
    runner: ModelRunner,
    reference: ModelRunner | None,
    window: int,
    stride: int,
    scored: Scored = lambda done, of, surprise: None,
) -> Evaluation:
    """Scores a text in sliding windows (see `windows`).

    Args:
        tokens: of the text, int32; at least two.
        reference: what the runner is compared with, of the same vocabulary; None: nothing.

    Raises:
        ModelError: a runner's logits are not numbers, or so far from the text that no perplexity is.
    """
    began = time.monotonic()
    parts: list[list[Scores]] = []
    surprise, done = 0.0, 0
    for each in windows(len(tokens), window, stride):
        parts.append(
            score(tokens, each, runner if reference is None else reference, [] if reference is None else [runner])
        )
        surprise += float(parts[-1][-1].surprise.sum(dtype=np.float64))
        done += each.end - each.scored
        scored(done, len(tokens) - 1, surprise / done)
    of_reference, of_runner = (Scores.joined([part[index] for part in parts]) for index in (0, -1))
    return Evaluation(
        done,
        perplexity(of_runner),
        None if reference is None else Loss.of(of_runner, of_reference),
        time.monotonic() - began,
    )


def perplexity(scores: Scores) -> float:
    """Exponential of the mean surprise.

    Raises:
        ModelError: it is beyond all numbers.
    """
    mean = float(scores.surprise.mean(dtype=np.float64))
    if mean > _MOST_SURPRISE:
        raise ModelError(f"the text is beyond this model: {mean:.3g} nats per token give no perplexity")
    return math.exp(mean)
