"""A semantic cache whose questions have known answers: what each policy serves of a stream, and how much is wrong."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.policy import (
    COMPARED_ANSWERS,
    LEAST_COMPARED,
    NEIGHBOURS,
    Evidence,
    JudgeError,
    Neighbourhood,
    Policy,
    label_of,
)
from cache.semantic.wording.comparison import compare
from cache.semantic.wording.text import Text

Ints = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]

# So many nearest questions are listed in advance for each; where too few of them are stored, all stored are searched.
_LISTED = 512


class StreamJudge(Protocol):
    """Says whether a fresh answer is a cached one; None where the call has failed."""

    @property
    def error(self) -> JudgeError: ...

    def compare(self, asked: int, other: int, same: bool, similarity: float, chance: random.Random) -> bool | None:
        """Of two questions by number: whose answer is fresh, and whose is cached. `same` is what is true."""
        ...


@dataclass(frozen=True, slots=True)
class SimulatedJudge:
    """Says whether two answers are the same, and errs as often as `error` says.

    Of `silent` of the pairs, whatever they are, it says nothing.
    """

    name: str
    error: JudgeError
    silent: float = 0.0

    def compare(self, asked: int, other: int, same: bool, similarity: float, chance: random.Random) -> bool | None:
        if chance.random() < self.silent:
            return None
        return chance.random() < (self.error.recall if same else self.error.false_same)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares of all requests."""

    hits: float
    wrong: float
    audits: float


class Step(NamedTuple):
    """What came of one request: whether it was a hit, and if so a wrong one, and audited."""

    hit: bool
    wrong: bool
    audit: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How it stood when `asked` requests were answered.

    `outcome` is of all of them. `upper` is what the policy then said: its upper bound of wrong answers per request.
    """

    asked: int
    outcome: Outcome
    upper: float


@dataclass(frozen=True, slots=True)
class Run:
    """A stream that was asked to its end: each request in the order of asking, and how it stood on the way."""

    steps: list[Step]
    checkpoints: list[Checkpoint]

    @property
    def end(self) -> Checkpoint:
        return self.checkpoints[-1]


@dataclass(frozen=True, slots=True)
class Questions:
    """`texts`, and by number the answer that is right for each, int64 [texts]."""

    texts: tuple[str, ...]
    answers: Ints

    @classmethod
    def of(cls, texts: Sequence[str], names: Sequence[str]) -> "Questions":
        """With numbers in place of the names of their answers."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(texts), np.array([numbers[name] for name in names], dtype=np.int64))

    def __add__(self, other: "Questions") -> "Questions":
        shifted = other.answers + self.answers.max() + 1
        return Questions(self.texts + other.texts, np.concatenate([self.answers, shifted]))


class Stream:
    """Questions that can be asked in any order; what does not depend on the order is computed once.

    Args:
        vectors: of the questions, float32 [questions, dimensions], of unit length.
    """

    def __init__(self, questions: Questions, vectors: Vectors) -> None:
        self.answers: Ints = questions.answers
        self.size = len(questions.texts)
        self.vectors = vectors
        self._questions = questions.texts
        self._texts: dict[int, Text] = {}
        listed = min(_LISTED, self.size - 1)
        self._near = np.empty((self.size, listed), dtype=np.int32)
        self._similarities = np.empty((self.size, listed), dtype=np.float32)
        for start in range(0, self.size, 1000):
            part = slice(start, min(start + 1000, self.size))
            similarities = vectors[part] @ vectors.T
            similarities[np.arange(part.stop - start), np.arange(start, part.stop)] = -np.inf
            chosen = np.argpartition(-similarities, listed - 1, axis=1)[:, :listed]
            values = np.take_along_axis(similarities, chosen, axis=1)
            order = np.argsort(-values, axis=1, kind="stable")
            self._near[part] = np.take_along_axis(chosen, order, axis=1)
            self._similarities[part] = np.take_along_axis(values, order, axis=1)

    def order(self, seed: int) -> Ints:
        return np.random.default_rng(seed).permutation(self.size)

    def nearest(self, question: int, stored: npt.NDArray[np.bool_], most: int) -> tuple[Ints, Vectors]:
        """The `most` nearest stored questions, and their similarities, falling."""
        near = self._near[question]
        places = np.flatnonzero(stored[near])[:most]
        if places.size == most:
            return near[places].astype(np.int64), self._similarities[question][places]
        candidates = np.flatnonzero(stored)
        similarities = self.vectors[candidates] @ self.vectors[question]
        order = np.argsort(-similarities, kind="stable")[:most]
        return candidates[order], similarities[order]

    def text(self, question: int) -> Text:
        text = self._texts.get(question)
        if text is None:
            text = self._texts[question] = Text.of(self._questions[question])
        return text


def serve_in_budget(
    stream: Stream, order: Ints, seed: int, delta: float, judge: StreamJudge, checkpoints: Sequence[int] = ()
) -> Run:
    """What the default policy serves with a budget of `delta`; `checkpoints` are numbers of requests, besides all."""
    policy = BudgetPolicy(delta, judge.error, random.Random(seed + 1))  # noqa: S311  # reproducible
    wanted = {*checkpoints, stream.size}
    steps: list[Step] = []
    reached = []
    for step in steps_by_policy(stream, order, policy, judge, seed):
        steps.append(step)
        if len(steps) in wanted:
            reached.append(Checkpoint(len(steps), outcome_of(steps), policy.figures()["wrong_upper"]))
    return Run(steps, reached)


def outcome_of(steps: Sequence[Step]) -> Outcome:
    """The shares of one step or more."""
    hits, wrong, audits = np.mean(np.array(steps, dtype=np.float64), axis=0).tolist()
    return Outcome(hits, wrong, audits)


def steps_by_policy(
    stream: Stream,
    order: Ints,
    policy: Policy,
    judge: StreamJudge,
    seed: int,
    vetoed: Callable[[str, bool], None] | None = None,
) -> Iterator[Step]:
    """What a policy serves: the votes are counted, texts compared and decided; misses are stored, and teach it.

    `vetoed` is told of each veto of what the policy would have served: its name, and whether that was wrong.
    """
    chance = random.Random(seed)  # noqa: S311  # reproducible
    stored = np.zeros(stream.size, dtype=np.bool_)
    groups = np.arange(stream.size)
    for asked in order.tolist():
        near, similarities = stream.nearest(asked, stored, NEIGHBOURS)
        evidence, source = None, -1
        if near.size:
            around = Neighbourhood([str(n) for n in near], similarities.tolist(), list(map(str, groups[near].tolist())))
            voted = policy.vote(around)
            evidence, source, veto = _compared_texts(stream, asked, near, voted)
            if veto and vetoed is not None and policy.assess(voted).serve:
                vetoed(veto, bool(stream.answers[near[voted.members[0]]] != stream.answers[asked]))
        decision = policy.decide(evidence)
        verdicts: dict[int, bool | None] = {}
        if not decision.serve or decision.audit:
            for other, similarity in _compared(near, similarities, groups, source, decision.audit):
                same = bool(stream.answers[other] == stream.answers[asked])
                verdicts[other] = judge.compare(asked, other, same, similarity, chance)
        verdict = verdicts.get(source)
        if evidence is not None and verdict is not None:
            label = label_of(evidence, decision, verdict, "audit" if decision.serve else "miss")
            policy.learn(label)
            if decision.audit:
                policy.settle(label)
        if not decision.serve:
            stored[asked] = True
            groups[asked] = next((groups[other] for other, said in verdicts.items() if said), asked)
        is_wrong = decision.serve and bool(stream.answers[source] != stream.answers[asked])
        yield Step(decision.serve, is_wrong, decision.serve and decision.audit)


def serve_by_threshold(stream: Stream, order: Ints, threshold: float, with_vetoes: bool) -> Outcome:
    """What a fixed threshold of similarity serves: the nearest neighbour, if it is near enough."""
    stored = np.zeros(stream.size, dtype=np.bool_)
    hits = wrong = 0
    for asked in order.tolist():
        near, similarities = stream.nearest(asked, stored, 1)
        if (
            near.size
            and similarities[0] >= threshold
            and not (with_vetoes and compare(stream.text(asked), [stream.text(int(near[0]))]).veto)
        ):
            hits += 1
            wrong += int(stream.answers[near[0]] != stream.answers[asked])
            continue
        stored[asked] = True
    return Outcome(hits / stream.size, wrong / stream.size, 0.0)


def _compared_texts(stream: Stream, asked: int, near: Ints, evidence: Evidence) -> tuple[Evidence | None, int, str]:
    """The evidence with that of the texts, the question that vouches; or None, -1, and the veto."""
    members = [int(near[place]) for place in evidence.members]
    wording = compare(stream.text(asked), [stream.text(other) for other in members])
    if wording.place is None:
        return None, -1, wording.veto
    return evidence.with_texts(wording.features), members[wording.place], ""


def _compared(
    near: Ints, similarities: Vectors, groups: Ints, source: int, only_source: bool
) -> list[tuple[int, float]]:
    """What was or would have been served, and the nearest of each other answer."""
    chosen: dict[int, tuple[int, float]] = {}
    pairs = list(zip(near.tolist(), similarities.tolist(), strict=True))
    for other, similarity in sorted(pairs, key=lambda pair: pair[0] != source):
        if other == source or (not only_source and similarity >= LEAST_COMPARED):
            chosen.setdefault(int(groups[other]), (other, similarity))
    return list(chosen.values())[:COMPARED_ANSWERS]
