"""The interface of a judge, which compares a fresh answer with cached ones."""

from collections.abc import Sequence
from typing import Protocol

MAX_SCORE = 10.0
"""Of texts that are equal; scores are log odds between this and its negative."""


class Judge(Protocol):
    """Compares answers in the background of requests. It never raises because of the texts."""

    same_above: float
    """Scores above are taken for the same, unless the traffic asks for more (error_rates.py)."""
    failures: int
    """Comparisons without a score, because the model gave none."""

    async def compare(self, model: str, question: str, fresh: str, cached: Sequence[str]) -> list[float | None]:
        """For each of `cached`, in their order, the log odds that it says what `fresh` says; None for no judgement.

        `question` is what `fresh` answers, and `model` the one that did.
        """
