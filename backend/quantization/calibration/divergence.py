"""Divergence between models' predictions, from the outputs of their last layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from backend.model_loader.weights import ModelWeights, dense
from backend.models.config import ModelConfig

_TOKENS = 256
"""Tokens per batch of logits."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """The end of a decoder: its last norm and its head."""

    config: ModelConfig
    weights: ModelWeights

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token log-probabilities float32 [n, vocabulary] for rows [n, hidden] of the last layer."""
        c = self.config
        normed = functional.rms_norm(hidden, (c.hidden_size,), self.weights.norm.float(), c.rms_norm_eps)
        logits = functional.linear(normed, dense(self.weights.head).float())
        if c.logit_softcap is not None:
            logits = c.logit_softcap * torch.tanh(logits / c.logit_softcap)
        return logits.log_softmax(-1)

    def divergences(self, expected: torch.Tensor, got: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
        """Compares models' last-layer outputs for the same tokens, float32 [..., hidden] each, with one model's.

        Returns:
            For each the mean of KL(expected ‖ got) in nats, and the share of tokens with the same top-1 prediction.
        """
        count = expected.shape[:-1].numel()
        sums = [[0.0, 0] for _ in got]
        for first in range(0, count, _TOKENS):
            part = slice(first, first + _TOKENS)
            ours = self(expected.flatten(0, -2)[part])
            likely, best = ours.exp(), ours.argmax(-1)
            for total, rows in zip(sums, got, strict=True):
                theirs = self(rows.flatten(0, -2)[part])
                total[0] += float((likely * (ours - theirs)).sum())
                total[1] += int((best == theirs.argmax(-1)).sum())
        return [(kl / count, same / count) for kl, same in sums]
