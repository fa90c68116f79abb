"""An exact share of requests for single upstreams."""

from collections.abc import Mapping, Sequence

from gateway.routing.strategies.load import load
from gateway.routing.strategies.rotation import Turns
from gateway.routing.strategy import C, Candidate, RouteRequest, Strategy

_OTHERS = ""
"""Stands for all upstreams without a share of their own; no upstream has this name."""


class Canary:
    """Gives each upstream of `shares` its share, and orders the others by `inner`.

    The share is kept by turns, not by chance: of n requests an upstream gets its share of n, to within one. Where an
    upstream is no candidate, its turns go to the others, and are not made up for.
    """

    def __init__(self, inner: Strategy, shares: Mapping[str, float]) -> None:
        self._inner = inner
        self._shares = dict(shares)
        self._rest = max(0.0, 1.0 - sum(shares.values()))
        self._turns = Turns()

    def order(self, candidates: Sequence[C], request: RouteRequest) -> list[C]:
        others = [candidate for candidate in candidates if candidate.name not in self._shares]
        canaries = {candidate.name: candidate for candidate in candidates if candidate.name in self._shares}
        chosen = self._turns.next({**self._shares, _OTHERS: self._rest})
        rest = [candidate for name, candidate in canaries.items() if name != chosen]
        if chosen in canaries:  # no turn of the others
            return [canaries[chosen], *sorted([*others, *rest], key=load)]
        return [*self._inner.order(others, request), *rest]

    def sent(self, candidate: Candidate, request: RouteRequest) -> None:
        self._inner.sent(candidate, request)
