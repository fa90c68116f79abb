"""The risk of answers that were found wrong: they are not served again until fresh answers confirm them."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

import msgspec

MAX_PENALTIES = 4096

_NEGLIGIBLE = 0.3

Penalty = tuple[Annotated[str, msgspec.Meta(max_length=512)], Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]]


class WrongAnswerRisk:
    """How often each answer was found wrong, by audits and by users; each time that it was right halves it.

    The posterior rates kinds of questions, not answers, and so learns too late of a popular answer that has become
    wrong. With a penalty of p the risk of an answer is at least p / (p + 1): one finding takes it out of service, for
    all its questions, and two fresh answers that say the same bring it back. A user who rejects everything takes out
    only the answers served to that user.
    """

    def __init__(self) -> None:
        self._penalties: OrderedDict[str, float] = OrderedDict()

    def risk_of(self, answer: str) -> float:
        """The least probability that it is wrong."""
        penalty = self._penalties.get(answer, 0.0)
        return penalty / (penalty + 1.0)

    def found(self, answer: str, same: bool, wrong: float = 1.0) -> None:
        """Record a judgement of an answer that was served, or would have been.

        `wrong` is the probability that one called different is wrong, since the judge errs.
        """
        if not same and (wrong >= _NEGLIGIBLE or answer in self._penalties):
            self._penalties[answer] = self._penalties.get(answer, 0.0) + wrong
            if len(self._penalties) > MAX_PENALTIES:
                self._penalties.popitem(last=False)
        elif same and answer in self._penalties:
            self._penalties[answer] /= 2
            if self._penalties[answer] < _NEGLIGIBLE:
                del self._penalties[answer]

    def state(self) -> tuple[Penalty, ...]:
        return tuple(self._penalties.items())

    def restore(self, state: Sequence[Penalty]) -> None:
        self._penalties = OrderedDict(state)
