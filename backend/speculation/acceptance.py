"""How likely a proposed token is accepted, learnt from those that were."""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 0.97
"""What a verified token's weight falls to with each one after it, within a sequence."""
_METHOD_MEMORY = 0.998
_WEIGHT = 4.0
"""Of what is known of a method, in verified tokens, beside what is known of a sequence."""


@dataclass(slots=True)
class Rate:
    """Accepted tokens of those verified; older ones count less."""

    accepted: float
    verified: float
    memory: float

    def record(self, accepted: int, verified: float) -> None:
        """Notes tokens that were verified one after the other, the accepted ones first."""
        faded = self.memory**verified
        self.accepted = self.accepted * faded + accepted
        self.verified = self.verified * faded + verified

    @property
    def share(self) -> float:
        """Accepted ones of all, from 0 to 1."""
        return self.accepted / self.verified


class Acceptance:
    """Rates of one method: of each class of drafts over all sequences, and of each sequence.

    A class is what a method says of a draft's quality, from 0 on.

    Args:
        expected: the rate of each class until it has been seen.
    """

    def __init__(self, expected: tuple[float, ...]) -> None:
        self._classes = [Rate(rate * _WEIGHT, _WEIGHT, _METHOD_MEMORY) for rate in expected]
        self._sequences: dict[int, Rate] = {}

    def rate(self, sequence_id: int, quality: int) -> float:
        """The probability that a token of such a draft is accepted if those before it are."""
        known = self._classes[quality].share
        own = self._sequences.get(sequence_id)
        if own is None:
            return known
        return (own.accepted + known * _WEIGHT) / (own.verified + _WEIGHT)

    def record(self, sequence_id: int, quality: int, accepted: int, verified: float) -> None:
        """Notes how many tokens of a draft were accepted, of those that could have been."""
        self._classes[quality].record(accepted, verified)
        own = self._sequences.get(sequence_id)
        if own is None:
            own = self._sequences[sequence_id] = Rate(0.0, 0.0, _MEMORY)
        own.record(accepted, verified)

    def forget(self, sequence_id: int) -> None:
        """Drops what is known of a sequence."""
        self._sequences.pop(sequence_id, None)
