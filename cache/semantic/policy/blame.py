"""Which answers were found wrong when they were served: nobody else shall get them before they are vindicated."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

import msgspec

MOST_BLAMED = 4096

_VINDICATED = 0.3

Blamed = tuple[Annotated[str, msgspec.Meta(max_length=512)], Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]]


class Blame:
    """How often each answer was found wrong, by audits and by users; each time that it was right halves it.

    The posterior knows kinds of questions, not answers: of one that is given a hundred times a minute, and has become
    wrong this minute, it learns too late. With a blame of b the risk of an answer is b / (b + 1) at least: one finding
    takes it out of service, under whichever of its questions it is kept, and two fresh ones that say the same bring it
    back. So a user who complains of everything takes out what he was served, and no more.
    """

    def __init__(self) -> None:
        self._blamed: OrderedDict[str, float] = OrderedDict()

    def risk_of(self, answer: str) -> float:
        """The least probability that it is wrong."""
        blame = self._blamed.get(answer, 0.0)
        return blame / (blame + 1.0)

    def found(self, answer: str, same: bool) -> None:
        """What a judgement says of an answer that was served, or would have been."""
        if not same:
            self._blamed[answer] = self._blamed.get(answer, 0.0) + 1.0
            if len(self._blamed) > MOST_BLAMED:
                self._blamed.popitem(last=False)
        elif answer in self._blamed:
            self._blamed[answer] /= 2
            if self._blamed[answer] < _VINDICATED:
                del self._blamed[answer]

    def state(self) -> tuple[Blamed, ...]:
        return tuple(self._blamed.items())

    def restore(self, state: Sequence[Blamed]) -> None:
        self._blamed = OrderedDict(state)
