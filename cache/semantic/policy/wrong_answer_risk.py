"""The risk of answers that were found wrong: they are not served again until fresh answers confirm them."""

from typing import Annotated

import msgspec

MAX_PENALTIES = 4096

_NEGLIGIBLE = 0.3

_Name = Annotated[str, msgspec.Meta(max_length=512)]
_Penalty = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]


class WrongAnswerRisk(msgspec.Struct, array_like=True):
    """How often each answer was found wrong, by audits and by users; each time that it was right halves it.

    The posterior rates kinds of questions, not answers, and so learns too late of a popular answer that has become
    wrong. With a penalty of p the risk of an answer is at least p / (p + 1): one finding takes it out of service, for
    all its questions, and two fresh answers that say the same bring it back. A user who rejects everything takes out
    only the answers served to that user.
    """

    penalties: Annotated[dict[_Name, _Penalty], msgspec.Meta(max_length=MAX_PENALTIES)] = {}
    """By answer, the oldest first."""

    def risk_of(self, answer: str) -> float:
        """The least probability that it is wrong."""
        penalty = self.penalties.get(answer, 0.0)
        return penalty / (penalty + 1.0)

    def found(self, answer: str, same: bool, wrong: float = 1.0) -> None:
        """Record a judgement of an answer that was served, or would have been.

        `wrong` is the probability that one called different is wrong, since the judge errs.
        """
        if not same and (wrong >= _NEGLIGIBLE or answer in self.penalties):
            self.penalties[answer] = self.penalties.get(answer, 0.0) + wrong
            if len(self.penalties) > MAX_PENALTIES:
                del self.penalties[next(iter(self.penalties))]
        elif same and answer in self.penalties:
            self.penalties[answer] /= 2
            if self.penalties[answer] < _NEGLIGIBLE:
                del self.penalties[answer]
