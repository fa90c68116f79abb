"""Which answers are one under different names.

A fresh answer takes the name of an equal one. It gets a name of its own where the judge misses that one, or where it is
not among the few that are compared; and later answers take that name. So neighbours that agree seem to disagree: after
3,000 questions that have 77 answers, these had 250 names. Two names are joined when the same fresh answers were found
equal to both.
"""

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from cache.semantic.policy.policy import AnswerName, EqualAnswers, JudgeError

_MOST = 4096
# Log likelihood ratio. A verdict weighs at most log(1 / .01) = 4.61, so three are needed at least.
_ENOUGH = 9.5
_LEAST_ERROR = 0.01


class AnswerGroups(msgspec.Struct, array_like=True):
    """Names that were joined: each goes on as the one of its group that sorts first.

    Raises ValueError where a name goes on as one that sorts after it.
    """

    joined: Annotated[dict[AnswerName, AnswerName], msgspec.Meta(max_length=_MOST)] = {}
    """The oldest first."""

    def __post_init__(self) -> None:
        if any(first >= name for name, first in self.joined.items()):
            raise ValueError("joined names go on as names that sort before them")
        for name in sorted(self.joined):  # an earlier version saved chains of names
            self.joined[name] = self.name_of(self.joined[name])

    def name_of(self, answer: str) -> str:
        """The one name of all answers that were found to be equal to this one."""
        return self.joined.get(answer, answer)

    def join(self, equal: EqualAnswers) -> tuple[str, str] | None:
        """The name that both go on with, and the one that is given up. None if they were joined before."""
        kept, given_up = sorted((self.name_of(equal.one), self.name_of(equal.other)))
        if kept == given_up:
            return None
        self.joined.update({name: kept for name, first in self.joined.items() if first == given_up})
        self.joined[given_up] = kept
        return kept, given_up

    def separate(self) -> tuple[str, str] | None:
        """Beyond 4,096 joined names the oldest is separate again: that one, and the one that it had gone on as."""
        if len(self.joined) <= _MOST:
            return None
        oldest = next(iter(self.joined))
        return oldest, self.joined.pop(oldest)


class Agreement:
    """Finds names to join, by a cumulative sum test (Page 1954): for each two names, the log likelihood ratio of fresh
    answers that took the one name and were, or were not, called equal to the other as well. It begins again at 0.

    Only what begins with "equal" is kept, which few pairs do, and of these the latest.
    """

    def __init__(self) -> None:
        self._ratios: dict[EqualAnswers, float] = {}

    def judged(self, said: Mapping[str, bool], judge: JudgeError) -> list[EqualAnswers]:
        """The names that are to be joined, now that a fresh answer was judged.

        `said` tells by name whether it is equal; it takes the first name of which that is so. `judge` is how often who
        says so errs.
        """
        own = next((name for name, same in said.items() if same), None)
        if own is None:
            return []
        found = []
        for name, same in said.items():
            pair = EqualAnswers(*sorted((own, name)))
            ratio = self._ratios.pop(pair, 0.0) + _log_ratio(same, judge)
            if name != own and ratio >= _ENOUGH:
                found.append(pair)
            elif name != own and ratio > 0.0:
                self._ratios[pair] = ratio
        while len(self._ratios) > _MOST:
            del self._ratios[next(iter(self._ratios))]
        return found


def _log_ratio(same: bool, judge: JudgeError) -> float:
    """Of a verdict, if the answers are equal and if they are not; no judge is taken to be better than 1 %."""
    if same:
        return math.log(judge.recall / max(judge.false_same, _LEAST_ERROR))
    return math.log(max(1.0 - judge.recall, _LEAST_ERROR) / (1.0 - judge.false_same))
