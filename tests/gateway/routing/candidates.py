"""Upstreams as a strategy sees them, without a server behind them."""

from dataclasses import dataclass

from gateway.upstreams.loaded import LoadedReport


@dataclass(eq=False, slots=True)
class FakeCandidate:
    """A `Candidate` whose load a test sets."""

    name: str
    weight: float = 1.0
    in_flight: int = 0
    latency: float = 0.0
    loaded: LoadedReport | None = None


def candidates(count: int) -> list[FakeCandidate]:
    """So many, named a, b, c, …"""
    return [FakeCandidate(chr(ord("a") + number)) for number in range(count)]
