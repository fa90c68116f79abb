"""What chooses among the upstreams of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeVar

from gateway.upstreams.loaded import LoadedReport


class Candidate(Protocol):
    """An upstream, as a strategy sees it. A simulated one has the same attributes."""

    @property
    def name(self) -> str:
        """Unique among all upstreams."""

    @property
    def weight(self) -> float:
        """Its capacity relative to others; more than 0."""

    @property
    def in_flight(self) -> int:
        """Requests that it has been sent and that have not ended."""

    @property
    def latency(self) -> float:
        """Seconds until it begins to answer, an exponentially weighted average; 0 while unknown."""

    @property
    def loaded(self) -> LoadedReport | None:
        """Which models it has said to have in memory; None if it does not say."""


C = TypeVar("C", bound=Candidate)

UNKNOWN: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a strategy may know of a request."""

    model: str
    blocks: tuple[int, ...] = ()
    """A number for each block of the prompt; equal numbers mean equal prefixes up to the end of that block."""
    held: Mapping[str, float] = field(default_factory=lambda: UNKNOWN)
    """The leading share of the prompt, from 0 to 1, whose KV blocks upstreams have said to hold, by their names."""


class Strategy(Protocol):
    """Orders candidates. One object serves all requests of one model, on one event loop."""

    def order(self, candidates: Sequence[C], request: RouteRequest) -> list[C]:
        """All of the candidates, the best first; [] for none. Called for each group of candidates that are
        equally well, and not again for retries.

        Changes no state but counters of its own.
        """

    def sent(self, candidate: Candidate, request: RouteRequest) -> None:
        """The candidate was sent the request, and will hold the KV blocks of its prompt. Called for every candidate
        that was sent it, before the next `order` if possible.
        """
