"""The interface of a judge, which compares a fresh answer with cached ones."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cache.semantic.policy.posterior import JudgeError


class Verdict(Enum):
    """A judge's verdict on two answers.

    UNSURE is no judgement; `Judge.doubts` says how it counts.
    """

    SAME = "same"
    DIFFERENT = "different"
    UNSURE = "unsure"


class Judge(Protocol):
    """Compares answers in the background of requests. It never raises because of the texts."""

    error: JudgeError
    doubts: bool
    """Whether UNSURE counts as DIFFERENT. True for a judge that is mostly unsure of different answers: without these
    wrong answers would seem rare. False if UNSURE means that the judge failed."""
    failures: int
    """Comparisons without a verdict, because the model gave none."""

    async def compare(self, question: str, fresh: str, cached: Sequence[str]) -> list[Verdict]:
        """One verdict for each of `cached`, in their order. `question` is what `fresh` answers."""
        ...


class Embedder(Protocol):
    """Computes vectors of texts for a judge."""

    async def embed(self, text: str) -> npt.NDArray[np.float32]:
        """The unit vector of `text`, float32 [dimensions]."""
        ...
