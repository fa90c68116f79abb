"""Arrivals, made of a trace: as many copies as wanted, each with prompts of its own, and questions that come again."""

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prefix_store.replay.trace import Trace, TraceRequest

_COPY = 2**44
"""More than any trace has numbers of blocks: those of a copy are apart from all others'."""


class Request(NamedTuple):
    """One request. Equal identities are the same question, whose answer may be stored."""

    time: float
    """Seconds since the start."""
    identity: int
    input_length: int
    """Tokens."""
    output_length: int
    """Tokens."""
    keys: Sequence[int]
    """A number for each block of its prompt."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How a trace becomes load."""

    rate: float = 1.0
    """How many times as fast as recorded requests come."""
    copies: int = 1
    """How many such streams there are; each begins at another place of the trace, and shares no prompt with others."""
    repeats: float = 0.0
    """The share of requests that ask again what was asked before, beside those of the trace itself."""
    seconds: float = math.inf
    """How long the load lasts at most."""
    seed: int = 1


class _Ids:
    """Identities of prompts: a number for the whole prompt, which its last block and its length determine."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}
        self._next = 0

    def of(self, last: int | None, length: int) -> int:
        if last is None:  # the trace does not say what prompts share
            self._next += 1
            return self._next
        identity = self._known.get((last, length))
        if identity is None:
            self._next += 1
            identity = self._known[last, length] = self._next
        return identity


def requests(trace: Trace, traffic: Traffic) -> Iterator[Request]:
    """In the order of their times. The same for the same seed."""
    recorded = list(trace.requests())
    if not recorded:
        return
    # The time between the last request and the first of the next turn: the mean of all.
    length = recorded[-1].time * (len(recorded) + 1) / len(recorded) if recorded[-1].time else 1.0
    copies = [_copy(recorded, length, number, traffic) for number in range(traffic.copies)]
    ids = _Ids()
    choose = random.Random(traffic.seed)  # noqa: S311  # a simulation, which is to be repeatable
    past: list[Request] = []
    for time, number, place in heapq.merge(*copies):
        if time >= traffic.seconds:
            return
        if past and choose.random() < traffic.repeats:
            # One of all requests so far, repetitions included: what was asked often is asked more often. The number of
            # times follows a power law (H. A. Simon, "On a class of skew distribution functions", Biometrika 1955).
            request = past[choose.randrange(len(past))]._replace(time=time)
        else:
            of = recorded[place]
            keys = [number * _COPY + key for key in of.keys] if number else of.keys
            identity = ids.of(keys[-1] if keys else None, of.input_length)
            request = Request(time, identity, of.input_length, of.output_length, keys)
        if traffic.repeats:
            past.append(request)
        yield request


def _copy(
    recorded: Sequence[TraceRequest], length: float, number: int, traffic: Traffic
) -> Iterator[tuple[float, int, int]]:
    """When which request of the trace comes in one copy: the trace from another place on, and then its beginning."""
    count = len(recorded)
    first = number * count // traffic.copies
    for step in range(first, first + count):
        place = step % count
        time = recorded[place].time - recorded[first].time + (length if step >= count else 0.0)
        yield time / traffic.rate, number, place
