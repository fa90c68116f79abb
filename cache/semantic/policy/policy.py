"""The contract of a decision policy, and what goes in and out of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

NEIGHBOURS = 16
"""How many neighbours of a question a policy is shown at most."""


class Neighbourhood(NamedTuple):
    """The entries nearest to a question, nearest first; 1 to NEIGHBOURS of them.

    `entries` are their ids, `similarities` the cosines to the question, falling. `answers` say which of them have the
    same answer, by equal numbers.
    """

    entries: Sequence[str]
    similarities: Sequence[float]
    answers: Sequence[int]


class Evidence(NamedTuple):
    """The answer that neighbours speak for, and how they do.

    `members` are the places of the neighbours that have this answer, nearest first; `entry` and `similarity` are those
    of the nearest. `features` are float64 [FEATURES of the policy], what the policy judges by beside these.
    """

    members: tuple[int, ...]
    entry: str
    similarity: float
    features: Vector


class Label(NamedTuple):
    """One judgement: whether the right answer to a question was the one that the evidence speaks for.

    `audited` says how it was found: by asking the upstream although the answer was served, or else because nothing was
    served and the fresh answer could be compared.
    """

    evidence: Evidence
    same: bool
    audited: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to serve the neighbours' answer.

    `risk` is the probability that it is wrong, None for a policy that knows none. `audit` says that the upstream is to
    be asked all the same, and the answers compared.
    """

    serve: bool
    risk: float | None
    audit: bool = False


class Policy(Protocol):
    """Decides from numbers alone whether a neighbour's answer is served. One task uses it."""

    def weigh(self, neighbourhood: Neighbourhood) -> Evidence:
        """Which of the neighbours' answers could be served. Changes nothing."""
        ...

    def decide(self, evidence: Evidence | None, most_risk: float = 1.0) -> Decision:
        """Decide one request; each request is decided exactly once.

        `evidence` is None if there is no neighbour, or a guard refuses all that have the answer. `most_risk` is what
        the caller allows; a policy that knows no risk serves nothing to one who limits it.
        """
        ...

    def learn(self, label: Label) -> None:
        """Take over a judgement, of this process or of another one."""
        ...
