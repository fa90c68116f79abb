"""The durations of one request, for its client: the response header Server-Timing (W3C Server Timing, section 4).

A request that asks for them has a `TimedSpan`, which wraps the span that it has anyway, so both get the same parts.
"""

import re
import time
from collections.abc import Mapping, MutableMapping, Sequence

from multidict import istr

from telemetry.tracing.span import NO_ATTRIBUTES, Attributes, Kind, Span

PROFILE_HEADER = "x-keepgate-profile"
"""A request with this header, whatever its value, is answered with its durations."""
SERVER_TIMING = "Server-Timing"
_PROFILE_NAME = istr(PROFILE_HEADER)  # looked up twice as fast as a plain string
# An element of the list; commas may stand in the quoted strings of its parameters.
_METRIC = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*")+')


class Timings:
    """Seconds by part, in the order in which the parts end. A part that comes again is added up."""

    def __init__(self, began: float) -> None:
        """`began` by `time.monotonic()`."""
        self._began = began
        self.seconds: dict[str, float] = {}
        self._theirs: list[str] = []

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self, told: Sequence[str]) -> None:
        """Keep what another server has told in lines of its header; its names get `upstream.` in front."""
        metrics = (metric.strip() for line in told for metric in _METRIC.findall(line))
        self._theirs = [f"upstream.{metric}" for metric in metrics if metric]

    def tell(self, headers: MutableMapping[str, str]) -> None:
        """Set the header of a response: the parts so far, how much time has passed, in milliseconds, and what the
        upstream has told.
        """
        parts = {**self.seconds, "total": time.monotonic() - self._began}
        own = [f"{name};dur={seconds * 1e3:.3f}" for name, seconds in parts.items()]
        headers[SERVER_TIMING] = ", ".join([*own, *self._theirs])


class TimedSpan(Span):
    """A span whose duration, and those of what goes on within it, are kept in `timings`."""

    __slots__ = ("_began", "_name", "timings", "traced")

    is_recorded = True

    def __init__(self, span: Span, timings: Timings, name: str = "") -> None:
        """Without a name it is the whole request, whose duration is told as `total`."""
        self.traced = span
        self.timings = timings
        self._name = name
        self._began = time.monotonic()

    @property
    def trace_id(self) -> str:
        return self.traced.trace_id

    def span(self, name: str, attributes: Attributes = NO_ATTRIBUTES, kind: Kind = "internal") -> Span:
        # A call to another server is named by its operation and model, of which there are many.
        part = "upstream" if kind == "client" else name
        return TimedSpan(self.traced.span(name, attributes, kind), self.timings, part)

    def record(self, name: str, began: float, ended: float, attributes: Attributes = NO_ATTRIBUTES) -> None:
        self.timings.add(name, max(0.0, ended - began))
        self.traced.record(name, began, ended, attributes)

    def rename(self, name: str) -> None:
        self.traced.rename(name)

    def set(self, attributes: Attributes) -> None:
        self.traced.set(attributes)

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        self.traced.event(name, attributes)

    def link(self, other: Span) -> None:
        self.traced.link(other)

    def fail(self, reason: str) -> None:
        self.traced.fail(reason)

    def headers(self) -> dict[str, str]:
        return self.traced.headers()

    def end(self) -> None:
        if self._name:
            self.timings.add(self._name, time.monotonic() - self._began)
            self._name = ""
        self.traced.end()


def timings_of(span: Span) -> Timings | None:
    """The durations of a request with this span, if it asked for them."""
    return span.timings if isinstance(span, TimedSpan) else None


def timed(span: Span, headers: Mapping[str, str], began: float) -> Span:
    """The span of a request with these headers, which began then by `time.monotonic()`."""
    return TimedSpan(span, Timings(began)) if _PROFILE_NAME in headers else span


def untimed(span: Span) -> Span:
    """The span without its timings, for work that goes on after the answer."""
    return span.traced if isinstance(span, TimedSpan) else span
