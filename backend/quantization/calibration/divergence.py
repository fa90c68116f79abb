"""How far a model's predictions are from another's, from what their last layers give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from backend.config import ModelConfig
from backend.weights import ModelWeights, dense

_TOKENS = 256
"""Whose logits are in memory at once."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """The end of a decoder: its last norm and its head."""

    config: ModelConfig
    weights: ModelWeights

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log-probabilities float32 [n, vocabulary] of what follows rows [n, hidden] of the last layer."""
        c = self.config
        normed = functional.rms_norm(hidden, (c.hidden_size,), self.weights.norm.float(), c.rms_norm_eps)
        logits = functional.linear(normed, dense(self.weights.head).float())
        if c.logit_softcap is not None:
            logits = c.logit_softcap * torch.tanh(logits / c.logit_softcap)
        return logits.log_softmax(-1)

    def divergence(self, expected: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
        """Of what two models' last layers gave for the same tokens, float32 [..., hidden].

        Returns:
            Mean of KL(expected ‖ got) in nats, and the share of tokens with the same most likely next one.
        """
        kl, same = 0.0, 0
        rows = zip(*(torch.split(side.flatten(0, -2), _TOKENS) for side in (expected, got)), strict=True)
        for ours, theirs in ((self(left), self(right)) for left, right in rows):
            kl += float((ours.exp() * (ours - theirs)).sum())
            same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count = expected.shape[:-1].numel()
        return kl / count, same / count
