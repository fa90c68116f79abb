"""The contract of a judge: does a fresh answer say what a cached one says?"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cache.semantic.policy.posterior import JudgeError


class Verdict(Enum):
    """What a judge says of two answers.

    UNSURE is no judgement: who learns from verdicts leaves it out, and the error of a judge is that of the others.
    """

    SAME = "same"
    DIFFERENT = "different"
    UNSURE = "unsure"


class Judge(Protocol):
    """Compares answers in the background of requests. It never raises because of what the texts say."""

    error: JudgeError
    """Of its verdicts SAME and DIFFERENT."""

    async def compare(self, question: str, fresh: str, cached: Sequence[str]) -> list[Verdict]:
        """One verdict for each of `cached`, in their order. `question` is what `fresh` answers."""
        ...


class Embedder(Protocol):
    """What turns texts into vectors for a judge."""

    async def embed(self, text: str) -> npt.NDArray[np.float32]:
        """The unit vector of `text`, float32 [dimensions]."""
        ...
