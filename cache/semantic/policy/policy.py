"""The contract of a decision policy, what goes in and out of it, and the simplest one: a static threshold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cache.semantic.messages import RiskFeature

FeatureVector = npt.NDArray[np.float64]
Source = Literal["miss", "audit", "user"]

NEIGHBOURS = 16
"""How many neighbours of a question a policy is shown at most."""
COMPARED_ANSWERS, LEAST_COMPARED = 4, 0.5
"""With how many different answers a fresh one is compared, and the least similarity of their questions, except of the
one whose answer would have been served."""

LABEL, EQUAL = "label", "equal answers"
"""The kinds of a label and of equal answers, for `freeze` and `thaw`."""
# Those of real evidence are below 15; with much larger ones a policy would reckon itself out of all bounds.
_MAX_FEATURE = 100.0
_MIN_CALLED_DIFFERENT = 1e-12

AnswerName = Annotated[str, msgspec.Meta(max_length=512)]
_Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Evidence(NamedTuple):
    """The answer that is meant and what is known of it. That of most votes is meant or, with a fixed threshold, that of
    the nearest neighbour.

    `members` are the places of the neighbours that have this `answer`, nearest first; `similarity` is that of the one
    that vouches for it, the nearest until their texts are compared. `features` are float64 [FEATURES of the policy],
    what the policy judges by; those of the texts are the last of them. The feature "similarity" is always that of the
    nearest.
    """

    members: tuple[int, ...]
    answer: str
    similarity: float
    features: FeatureVector

    def with_texts(self, features: Sequence[float]) -> "Evidence":
        """The same with the features of compared texts."""
        return self._replace(features=np.concatenate((self.features[: -len(features)], features)))


Refusal = Literal["", "none near", "warm-up", "risk", "max-risk", "similarity"]
"""Why nothing is served: nothing is near, or all of it has a veto; too few judgements; a risk above the policy's limit,
or the request's own; too little similarity. "" where it is served.
"""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to serve the neighbours' answer.

    `risk` is the probability that this answer is wrong, after all corrections and in [0, 1]: what `x-keepgate-risk`
    shows. It is None for a policy that knows none. `plain_risk` is the same before the correction by judgements,
    infinite, where a budget is kept, if nothing is near or a veto forbids it. `audit` says that the upstream is to be
    asked although the answer is served, and the answers compared; `audit_chance` is the probability with which that was
    drawn, 0 where nothing is served. `limit` is the highest risk that was served then, None where the policy has none,
    and `inflation` the correction by judgements.
    """

    serve: bool
    risk: float | None
    plain_risk: float = 1.0
    audit: bool = False
    audit_chance: float = 0.0
    limit: float | None = None
    inflation: float = 1.0
    refusal: Refusal = ""


class JudgeError(msgspec.Struct, frozen=True, array_like=True):
    """How often who compares two answers is wrong.

    `recall` is the share of same answers that are called the same, `false_same` that of different ones.
    """

    recall: float
    false_same: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.false_same < self.recall <= 1.0:
            raise ValueError(
                f"A judge with recall {self.recall} and false_same {self.false_same} tells nothing apart;"
                " right is 0 <= false_same < recall <= 1."
            )

    def toward(self, other: "JudgeError", share: float) -> "JudgeError":
        """The mean of both, with the share of `other`."""
        kept = 1.0 - share
        return JudgeError(kept * self.recall + share * other.recall, kept * self.false_same + share * other.false_same)

    def really_wrong(self, risk: float) -> float:
        """How often an answer is wrong that is called different, and was wrong with the probability `risk` before."""
        wrong = risk * (1.0 - self.false_same)
        return wrong / max(wrong + (1.0 - risk) * (1.0 - self.recall), _MIN_CALLED_DIFFERENT)

    def wrong_among(self, different: float) -> float:
        """The share of wrong answers behind a share that is called different (Rogan and Gladen)."""
        return min(1.0, max(0.0, (different - (1.0 - self.recall)) / (self.recall - self.false_same)))


class Label(msgspec.Struct, frozen=True, array_like=True):
    """Whether the right answer to a question was the `answer` that the neighbours spoke for.

    `answer` and `features` are those of the evidence. `source` is how it was found: "miss" if nothing was served and
    the fresh answer could be compared, "audit" if it was compared although the answer was served, "user" if the user
    repeated it at once, or deleted the answer. `risk` is the decision's `plain_risk`, `chance` the probability with
    which an audit was drawn for it: an audited hit stands for 1 / chance hits. `judge` is how often who compared these
    very answers errs; None is as often as the policy was told.

    Raises ValueError where it could not have been.
    """

    answer: AnswerName
    features: Annotated[tuple[float, ...], msgspec.Meta(max_length=64)]
    same: bool
    source: Source
    risk: _Probability = 1.0
    chance: _Probability = 1.0
    judge: JudgeError | None = None

    def __post_init__(self) -> None:
        if not all(abs(feature) <= _MAX_FEATURE for feature in self.features):
            raise ValueError(f"every feature must be within ±{_MAX_FEATURE:g}")
        if self.source == "audit" and self.chance <= 0.0:
            raise ValueError("an audit has a chance above 0")

    @classmethod
    def of(
        cls, evidence: Evidence, decision: Decision, same: bool, source: Source, judge: JudgeError | None = None
    ) -> "Label":
        """The judgement of an answer that was, or would have been, served."""
        chance = 1.0 if source == "miss" else decision.audit_chance
        return cls(evidence.answer, tuple(evidence.features.tolist()), same, source, decision.plain_risk, chance, judge)


class EqualAnswers(msgspec.Struct, frozen=True, array_like=True):
    """Two names of what was found to be one answer."""

    one: AnswerName
    other: AnswerName


class Policy(Protocol):
    """Decides from numbers alone whether a neighbour's answer is served. One task uses it.

    What it learns from labels is the same in all processes that saw the same labels in the same order, and outlives
    them by `snapshot`. What it spends, it keeps for itself. One that learns nothing decides, and leaves the rest as it
    is here.
    """

    def vote(self, neighbours: Sequence[tuple[str, float]]) -> Evidence:
        """Which of the neighbours' answers could be served. Changes nothing.

        Of each of `neighbours`, 1 to NEIGHBOURS, the nearest first: its answer, which has the same name where it is the
        same, and its cosine to the question.
        """

    def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
        """Decide one request; each request is decided exactly once.

        `evidence` is None if there is no neighbour, or a veto forbids all that have the answer. `max_risk` is what
        the caller allows; a policy that knows no risk serves nothing to one who limits it. Who `compares` will judge
        what is decided here whatever it is, as if each serving were audited.
        """

    def assess(self, evidence: Evidence, max_risk: float = 1.0) -> Decision:
        """What `decide` would say, without an audit. Changes nothing."""

    def reason(self, evidence: Evidence, decision: Decision, max_risk: float) -> str:
        """A sentence for an operator that says why `assess` has just returned this decision."""

    def features(self, evidence: Evidence) -> tuple[RiskFeature, ...]:
        """What makes the risk, the largest part first; nothing where the policy knows no risk. Changes nothing."""
        return ()

    def learn(self, label: Label) -> None:
        """Take over a judgement, of this process or of another one.

        Raises UnusableState for one that this policy cannot use, and has then learned nothing.
        """
        return

    def name_of(self, answer: str) -> str:
        """The one name of all answers that are known to be equal to this one. Changes nothing."""
        return answer

    def names_to_join(self, said: Mapping[str, bool], judge: JudgeError) -> list[EqualAnswers]:
        """Those that this process has now seen to be one answer, which is then to be taken over by all, by `join`.

        `said` tells by name which answers a fresh one was called equal to; `judge` is how often who says so errs.
        """
        return []

    def join(self, equal: EqualAnswers) -> None:
        """Take over, as `learn` does, that two answers are one."""
        return

    def settle(self, label: Label) -> None:
        """Book a judgement of what this very process has served: an audit, or a user's complaint; beside `learn`."""
        return

    def snapshot(self) -> bytes:
        """What was learned, for `restore` of the same policy in this process or another."""
        return b""

    def restore(self, state: bytes) -> None:
        """Take over what was learned. Raises UnusableState, and is then as before."""
        return

    def figures(self) -> dict[str, float]:
        """What an operator may want to see of it, by name."""
        return {}

    def reliability(self) -> list[dict[str, float]]:
        """What was predicted and what judgements have shown, by classes of risk; empty where no budget is kept.

        See `Reliability.figures`.
        """
        return []


class ThresholdPolicy(Policy):
    """The static threshold that other caches have: the nearest neighbour's answer, if it is near enough.

    It knows no bound on wrong answers.

    Args:
        threshold: least cosine similarity.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def vote(self, neighbours: Sequence[tuple[str, float]]) -> Evidence:
        return Evidence((0,), *neighbours[0], np.empty(0))

    def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
        if evidence is None:
            return Decision(False, None, refusal="none near")
        if max_risk < 1.0 or evidence.similarity < self._threshold:
            return Decision(False, None, refusal="max-risk" if max_risk < 1.0 else "similarity")
        return Decision(True, None, audit=compares, audit_chance=float(compares))

    def assess(self, evidence: Evidence, max_risk: float = 1.0) -> Decision:
        return self.decide(evidence, max_risk)

    def reason(self, evidence: Evidence, decision: Decision, max_risk: float) -> str:
        if max_risk < 1.0:
            return "a fixed threshold knows no risk, which the request limits"
        place = "at or above" if decision.serve else "below"
        return f"the similarity {evidence.similarity:.4f} is {place} {self._threshold:g}"

    def figures(self) -> dict[str, float]:
        return {"threshold": self._threshold}
