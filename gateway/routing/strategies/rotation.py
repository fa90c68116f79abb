"""Strategies that look at nothing but whose turn it is."""

from collections.abc import Mapping, Sequence

from gateway.routing.strategy import C, Candidate, RouteRequest


class Turns:
    """Smooth weighted round robin, as nginx has it: of any n turns in a row each name has its share, to within one.

    Every name gains its weight at each turn; the one that has most takes the turn, and pays the sum of all weights.
    """

    def __init__(self) -> None:
        self._credits: dict[str, float] = {}

    def next(self, weights: Mapping[str, float]) -> str:
        """The name whose turn it is; `weights` has at least one. Names that are not there lose what they had."""
        credits = {name: self._credits.get(name, 0.0) + weight for name, weight in weights.items()}
        chosen = max(credits, key=credits.__getitem__)
        credits[chosen] -= sum(weights.values())
        self._credits = credits
        return chosen


class Weighted:
    """Each upstream in its turn, as often as its weight says."""

    def __init__(self) -> None:
        self._turns = Turns()

    def order(self, candidates: Sequence[C], request: RouteRequest) -> list[C]:
        if not candidates:
            return []
        chosen = self._turns.next({candidate.name: candidate.weight for candidate in candidates})
        return rotated(candidates, chosen)

    def sent(self, candidate: Candidate, request: RouteRequest) -> None:
        """Does nothing: a turn is taken when it is given."""


class RoundRobin(Weighted):
    """Each upstream in its turn. Weights are capacities here as well: with equal ones, which is the default, turns are
    equal.
    """


def rotated(candidates: Sequence[C], first: str) -> list[C]:
    """The candidates from the one of that name on, then those before it."""
    at = next(number for number, candidate in enumerate(candidates) if candidate.name == first)
    return [*candidates[at:], *candidates[:at]]
