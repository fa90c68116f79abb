"""A semantic cache whose questions have known answers: what each policy serves of a stream, and how much is wrong."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.semantic.embedding.encoder import Vectors
from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.policy import COMPARED_ANSWERS, LEAST_COMPARED, NEIGHBOURS, JudgeError, Label
from cache.semantic.wording.comparison import compare
from cache.semantic.wording.text import Text

CHECKPOINTS = 10
Ints = npt.NDArray[np.int64]

# So many nearest questions are listed in advance for each, itself among them, which is not yet stored when it is asked;
# where too few of the others are stored, all stored are searched.
_LISTED = 513


@dataclass
class StreamJudge:
    """Says whether two answers of a stream are the same: here it knows, and errs as often as `error` says.

    Of `silent` of the pairs, whatever they are, it says nothing.
    """

    name: str
    error: JudgeError
    silent: float = 0.0

    def compare(self, asked: int, other: int, same: bool, chance: random.Random) -> bool | None:
        """Of two questions by number: whether the fresh answer to `asked` is the cached one of `other`.

        `same` is what is true. None where the call has failed.
        """
        if chance.random() < self.silent:
            return None
        return chance.random() < (self.error.recall if same else self.error.false_same)


class Outcome(NamedTuple):
    """Shares of requests: answered from the cache, with a wrong answer, and audited. Of one request they are 0 or 1."""

    hits: float
    wrong: float
    audits: float


class Checkpoint(NamedTuple):
    """How it stood when `asked` requests were answered.

    `outcome` is of all of them. `upper` is what the policy then said: its upper bound of wrong answers per request.
    """

    asked: int
    outcome: Outcome
    upper: float


class Run(NamedTuple):
    """A stream that was asked to its end: each request in the order of asking, and how it stood after each tenth.

    `withheld` counts, for each veto, the answers that the policy would have served without it: right ones under
    (name, False), wrong ones under (name, True).
    """

    steps: list[Outcome]
    checkpoints: list[Checkpoint]
    withheld: Counter[tuple[str, bool]]

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
        self.answers = questions.answers
        self.texts = [Text.of(text) for text in questions.texts]
        self.size = len(self.texts)
        self.vectors = vectors
        listed = min(_LISTED, self.size)
        self._near = np.empty((self.size, listed), dtype=np.int32)
        self._similarities = np.empty((self.size, listed), dtype=np.float32)
        for start in range(0, self.size, 1000):
            part = slice(start, start + 1000)
            similarities = vectors[part] @ vectors.T
            chosen = np.argpartition(-similarities, listed - 1, axis=1)[:, :listed]
            order = np.argsort(-np.take_along_axis(similarities, chosen, axis=1), axis=1, kind="stable")
            self._near[part] = np.take_along_axis(chosen, order, axis=1)
            self._similarities[part] = np.take_along_axis(similarities, self._near[part], axis=1)

    def order(self, seed: int) -> Ints:
        return np.random.default_rng(seed).permutation(self.size)

    def nearest(self, question: int, stored: npt.NDArray[np.bool_], most: int) -> tuple[Ints, Vectors]:
        """The `most` nearest stored questions, and their similarities, falling."""
        places = np.flatnonzero(stored[self._near[question]])[:most]
        if places.size == most:
            return self._near[question, places].astype(np.int64), self._similarities[question, places]
        candidates = np.flatnonzero(stored)
        similarities = self.vectors[candidates] @ self.vectors[question]
        order = np.argsort(-similarities, kind="stable")[:most]
        return candidates[order], similarities[order]


def serve_in_budget(stream: Stream, order: Ints, seed: int, delta: float, judge: StreamJudge) -> Run:
    """What the default policy serves with a budget of `delta`: misses are stored, and what `judge` says teaches it."""
    policy = BudgetPolicy(delta, judge.error, random.Random(seed + 1))  # noqa: S311  # reproducible
    chance = random.Random(seed)  # noqa: S311  # reproducible
    marks = {round(stream.size * part / CHECKPOINTS) for part in range(1, CHECKPOINTS + 1)}
    answers = stream.answers.tolist()
    stored = np.zeros(stream.size, dtype=np.bool_)
    # By question: the first one whose answer is the same, as far as the judge has said.
    groups = np.arange(stream.size)

    def name(question: int) -> str:
        return policy.name_of(str(groups[question]))

    run = Run([], [], Counter())
    for asked in order.tolist():
        near, similarities = stream.nearest(asked, stored, NEIGHBOURS)
        evidence, source = None, -1
        if near.size:
            voted = policy.vote(list(zip(map(str, groups[near].tolist()), similarities.tolist(), strict=True)))
            members = near[list(voted.members)].tolist()
            wording = compare(stream.texts[asked], [stream.texts[member] for member in members])
            if wording.place is not None:
                evidence, source = voted.with_texts(wording.features), members[wording.place]
            elif policy.assess(voted).serve:
                run.withheld[wording.veto, answers[members[0]] != answers[asked]] += 1
        decision = policy.decide(evidence)
        others = [source] if decision.audit else []
        if not decision.serve:
            others = _compared(near[similarities >= LEAST_COMPARED].tolist(), name, source)
        verdicts = {other: judge.compare(asked, other, answers[other] == answers[asked], chance) for other in others}
        verdict = verdicts.get(source)
        if evidence is not None and verdict is not None:
            label = Label.of(evidence, decision, verdict, "audit" if decision.serve else "miss")
            policy.learn(label)
            if decision.audit:
                policy.settle(label)
        if not decision.serve:
            stored[asked] = True
            groups[asked] = next((groups[other] for other, same in verdicts.items() if same), asked)
            said = {name(other): same for other, same in verdicts.items() if same is not None}
            for equal in policy.names_to_join(said, judge.error):
                policy.join(equal)
        is_wrong = decision.serve and answers[source] != answers[asked]
        run.steps.append(Outcome(decision.serve, is_wrong, decision.audit))
        if len(run.steps) in marks:
            run.checkpoints.append(Checkpoint(len(run.steps), outcome_of(run.steps), policy.figures()["wrong_upper"]))
    return run


def _compared(near: Sequence[int], name: Callable[[int], str], source: int) -> list[int]:
    """`source`, whose answer would have been served, unless it is -1; and the nearest question of each other answer."""
    chosen = {} if source < 0 else {name(source): source}
    for other in near:
        chosen.setdefault(name(other), other)
    return list(chosen.values())[:COMPARED_ANSWERS]


def outcome_of(steps: Sequence[Outcome]) -> Outcome:
    """The shares of one step or more."""
    return Outcome(*np.mean(np.array(steps, dtype=np.float64), axis=0).tolist())


def serve_by_threshold(stream: Stream, order: Ints, threshold: float, with_vetoes: bool) -> Outcome:
    """What a fixed threshold of similarity serves: the nearest neighbour, if it is near enough."""
    stored = np.zeros(stream.size, dtype=np.bool_)
    steps = []
    for asked in order.tolist():
        near, similarities = stream.nearest(asked, stored, 1)
        is_hit = is_wrong = False
        if near.size and similarities[0] >= threshold:
            other = int(near[0])
            is_hit = not (with_vetoes and compare(stream.texts[asked], [stream.texts[other]]).veto)
            is_wrong = is_hit and bool(stream.answers[other] != stream.answers[asked])
        stored[asked] = not is_hit
        steps.append(Outcome(is_hit, is_wrong, False))
    return outcome_of(steps)
