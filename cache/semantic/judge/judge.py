"""The contract of a judge: does a fresh answer say what a cached one says?"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cache.semantic.policy.posterior import JudgeError


class Verdict(Enum):
    """What a judge says of two answers.

    UNSURE is no judgement; what it is taken for, `Judge.doubts` says.
    """

    SAME = "same"
    DIFFERENT = "different"
    UNSURE = "unsure"


class Judge(Protocol):
    """Compares answers in the background of requests. It never raises because of what the texts say."""

    error: JudgeError
    doubts: bool
    """Whether UNSURE is to be taken for DIFFERENT. It is where somebody is mostly unsure of different answers, who
    would make wrong ones look rare if his doubts were left out; not where it means that he could not be asked."""
    failures: int
    """Comparisons without a verdict, because the model gave none."""

    async def compare(self, question: str, fresh: str, cached: Sequence[str]) -> list[Verdict]:
        """One verdict for each of `cached`, in their order. `question` is what `fresh` answers."""
        ...


class Embedder(Protocol):
    """What turns texts into vectors for a judge."""

    async def embed(self, text: str) -> npt.NDArray[np.float32]:
        """The unit vector of `text`, float32 [dimensions]."""
        ...
