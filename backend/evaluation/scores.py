"""How a runner's next-token distributions suit a text, and how far they are from those of another runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, SequenceRows, pack
from backend.errors import ModelError
from backend.evaluation.windows import Window

_MOST_LOGITS = 2**25
"""In a step, whatever the vocabulary: 128 MiB, and a few times as much while two runners are compared."""

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one runner and some tokens of a text."""

    surprise: Numbers
    """Negative log-likelihood of each token, in nats."""
    divergence: Numbers
    """Kullback-Leibler divergence from the reference's distribution of each token to this one, in nats."""
    agrees: npt.NDArray[np.bool_]
    """Whether this runner's first choice for each token is the reference's."""

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Of the tokens of one part after the other."""
        return cls(
            np.concatenate([part.surprise for part in parts]),
            np.concatenate([part.divergence for part in parts]),
            np.concatenate([part.agrees for part in parts]),
        )


def score(
    tokens: npt.NDArray[np.int32], window: Window, reference: ModelRunner, others: Sequence[ModelRunner]
) -> list[Scores]:
    """Runs one window through all runners: the scores of the reference, then those of the others.

    The runners compute the same chunks in turns, so that never more than two runners' logits are in memory, and of
    one chunk only.

    Args:
        tokens: of the whole text, int32.
        others: of the same vocabulary; they may be none, and the reference may be one of them.

    Raises:
        ModelError: a runner's logits are not numbers.
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
    """Tokens that one step takes. The last of the window is not computed: what follows it is not in it."""
    of_vocabulary = max(1, _MOST_LOGITS // runners[0].config.vocab_size)
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
        raise ModelError(f"{runner.name}: the logits after token {end - 1} of the text, or one before, are no numbers")
    return logits.log_softmax(-1)


def _scores(expected: torch.Tensor, got: torch.Tensor, following: torch.Tensor) -> Scores:
    """Of log-probabilities [tokens, vocabulary] and the tokens that came."""
    surprise = -got.gather(1, following.to(got.device).unsqueeze(1)).squeeze(1)
    return Scores(
        surprise.cpu().numpy(),
        (divergence(expected, got) if got is not expected else torch.zeros(len(got))).cpu().numpy(),
        (expected.argmax(-1) == got.argmax(-1)).cpu().numpy(),
    )


def divergence(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence KL(expected || got) in nats of log-probabilities [..., vocabulary]: [...]."""
    return (expected.exp() * (expected - got)).sum(-1)
