"""Scores of a text, window by window: the log-likelihood of its tokens, and the KL divergence between runners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, SequenceRows, pack
from backend.errors import ModelError

_MAX_STEP_LOGITS = 2**25
"""128 MiB; a comparison of two runners takes a few times as much."""

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens ``begin`` to ``end`` of a text, as a sequence of their own; tokens from ``scored`` on are scored in it.

    begin                 scored            end
      | context of the stride | scored once  |
    """

    begin: int
    scored: int
    end: int


def windows(tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Windows of at most ``size`` tokens, each ``stride`` further on, the last one up to the end of the text.

    Every token but the first is scored in exactly one window: after at least ``size - stride`` others, if so many
    precede it. This is the method of transformers' guide to perplexity.

    Args:
        stride: 1 to ``size - 1``, so that no window begins with a token to score.
    """
    begin, scored = 0, 1
    while scored < tokens:
        end = min(begin + size, tokens)
        yield Window(begin, scored, end)
        begin, scored = begin + stride, end


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one runner for some tokens of a text."""

    nll: Numbers
    """Negative log-likelihood of each token, in nats."""
    kl: Numbers
    """Kullback-Leibler divergence from the reference's distribution of each token to this one, in nats."""
    agrees: npt.NDArray[np.bool_]
    """Whether this runner's top-1 prediction of each token is the same."""

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of consecutive parts."""
        return cls(
            np.concatenate([part.nll for part in parts]),
            np.concatenate([part.kl for part in parts]),
            np.concatenate([part.agrees for part in parts]),
        )


def score(
    tokens: npt.NDArray[np.int32], window: Window, reference: ModelRunner, others: Sequence[ModelRunner]
) -> list[Scores]:
    """Runs one window through all runners: the scores of the reference, then those of the others.

    The runners compute chunk by chunk in turns, so that at most the logits of two runners and one chunk are in memory.

    Args:
        tokens: of the whole text, int32.
        others: runners with the same vocabulary; may be empty, and may contain the reference.

    Raises:
        ModelError: a runner's logits are NaN or infinite.
    """
    parts: list[list[Scores]] = [[] for _ in range(1 + len(others))]
    for start, end in _chunks(window, (reference, *others)):
        # A token is predicted by the row before it.
        following = torch.from_numpy(tokens[max(start, window.scored - 1) + 1 : end + 1]).long()
        expected = _log_probabilities(reference, tokens, window.begin, start, end, len(following))
        parts[0].append(_scores(expected, expected, following))
        for part, runner in zip(parts[1:], others, strict=True):
            got = _log_probabilities(runner, tokens, window.begin, start, end, len(following))
            part.append(_scores(expected, got.to(expected.device), following))
    return [Scores.joined(part) for part in parts]


def _chunks(window: Window, runners: Sequence[ModelRunner]) -> Iterator[tuple[int, int]]:
    """Start and end of the tokens of each step. The window's last token predicts nothing in it and is left out."""
    of_vocabulary = max(1, _MAX_STEP_LOGITS // runners[0].config.vocab_size)
    size = min(of_vocabulary, *(runner.step_tokens for runner in runners))
    for start in range(window.begin, window.end - 1, size):
        yield start, min(start + size, window.end - 1)


def _log_probabilities(
    runner: ModelRunner, tokens: npt.NDArray[np.int32], begin: int, start: int, end: int, wanted: int
) -> torch.Tensor:
    """Log-probabilities after the last ``wanted`` of the tokens ``start`` to ``end``: float32 [wanted, vocabulary]."""
    blocks = range(-(-(end - begin) // BLOCK_SIZE))
    count = end - start
    rows = SequenceRows(tokens[start:end].tolist(), start - begin, blocks)
    logits = runner.run(pack([rows], range(count - wanted, count))).logits
    if not bool(torch.isfinite(logits).all()):
        raise ModelError(f"{runner.name}: the logits after token {end - 1} of the text, or before, are not finite")
    return logits.log_softmax(-1)


def _scores(expected: torch.Tensor, got: torch.Tensor, following: torch.Tensor) -> Scores:
    """Scores of log-probabilities [tokens, vocabulary] for the tokens that follow."""
    nll = -got.gather(1, following.to(got.device).unsqueeze(1)).squeeze(1)
    return Scores(
        nll.cpu().numpy(),
        (kl_divergence(expected, got) if got is not expected else torch.zeros(len(got))).cpu().numpy(),
        (expected.argmax(-1) == got.argmax(-1)).cpu().numpy(),
    )


def kl_divergence(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence KL(expected || got) in nats of log-probabilities [..., vocabulary]: [...]."""
    return (expected.exp() * (expected - got)).sum(-1)
