"""Perplexity of a text, and the loss against a reference runner."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backend.engine.model_runner import ModelRunner
from backend.errors import ModelError
from backend.evaluation.scores import Scores, score, windows

OnWindow = Callable[[int, int, float], None]
"""Called after each window with the tokens scored, all tokens, and the mean negative log-likelihood so far."""

_MAX_NLL = 700.0
"""In nats; the perplexity of a larger mean overflows."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Difference between a model and its reference over the same tokens."""

    reference_perplexity: float
    kl_mean: float
    """Nats per token, from the reference's distribution to the model's."""
    kl_p99: float
    """99th percentile over the tokens."""
    top1_agreement: float
    """Share of the tokens with the same top-1 prediction."""

    @classmethod
    def of(cls, scores: Scores, reference: Scores) -> Loss:
        """Computes the loss from the scores of a model and of its reference."""
        return cls(
            perplexity(reference),
            float(scores.kl.mean(dtype=np.float64)),
            float(np.quantile(scores.kl, 0.99)),
            float(scores.agrees.mean()),
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of one model on one text."""

    tokens: int
    """Tokens scored: all of the text but the first."""
    perplexity: float
    loss: Loss | None
    """None: there is no reference."""
    seconds: float


def evaluate(
    tokens: npt.NDArray[np.int32],
    runner: ModelRunner,
    reference: ModelRunner | None,
    window: int,
    stride: int,
    on_window: OnWindow = lambda done, total, mean_nll: None,
) -> Evaluation:
    """Scores a text in sliding windows (see `windows`).

    Args:
        tokens: of the text, int32 [tokens]; at least two.
        reference: runner to compare with, of the same vocabulary; None: no comparison.

    Raises:
        ModelError: a runner's logits are not finite, or the perplexity overflows.
    """
    began = time.monotonic()
    parts: list[list[Scores]] = []
    nll, done = 0.0, 0
    for text_window in windows(len(tokens), window, stride):
        parts.append(
            score(
                tokens, text_window, runner if reference is None else reference, [] if reference is None else [runner]
            )
        )
        nll += float(parts[-1][-1].nll.sum(dtype=np.float64))
        done += text_window.end - text_window.scored
        on_window(done, len(tokens) - 1, nll / done)
    of_reference, of_runner = (Scores.joined([part[index] for part in parts]) for index in (0, -1))
    return Evaluation(
        done,
        perplexity(of_runner),
        None if reference is None else Loss.of(of_runner, of_reference),
        time.monotonic() - began,
    )


def perplexity(scores: Scores) -> float:
    """Exponential of the mean negative log-likelihood.

    Raises:
        ModelError: it overflows.
    """
    mean = float(scores.nll.mean(dtype=np.float64))
    if mean > _MAX_NLL:
        raise ModelError(f"the perplexity overflows: {mean:.3g} nats per token; this model does not fit the text")
    return math.exp(mean)
