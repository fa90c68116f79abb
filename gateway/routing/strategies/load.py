"""Strategies that look at how busy upstreams are."""

import random
from collections.abc import Sequence

from gateway.routing.strategies.rotation import Weighted
from gateway.routing.strategy import C, Candidate, RouteRequest


class LeastConnections(Weighted):
    """The upstream with the fewest requests under way for its weight; of equal ones, each in its turn."""

    def order(self, candidates: Sequence[C], request: RouteRequest) -> list[C]:
        return sorted(super().order(candidates, request), key=load)


class PowerOfTwo:
    """The better one of two that are drawn by chance: few requests go to one that has just been slow, and no herd goes
    to one that has just been fast (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311  # no secret

    def order(self, candidates: Sequence[C], request: RouteRequest) -> list[C]:
        drawn = self._random.sample(candidates, len(candidates))
        return sorted(drawn[:2], key=expected_wait) + sorted(drawn[2:], key=expected_wait)

    def sent(self, candidate: Candidate, request: RouteRequest) -> None:
        """Does nothing: the candidate itself counts what is under way."""


def load(candidate: Candidate) -> float:
    """Requests under way with one more, for the candidate's weight."""
    return (candidate.in_flight + 1) / candidate.weight


def expected_wait(candidate: Candidate) -> float:
    """Measured seconds until an answer begins, times what is under way; the least for one that has yet to show it."""
    return candidate.latency * load(candidate)
