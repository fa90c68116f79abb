"""What a request is traced with, and what a request without a trace gets: nothing here imports OpenTelemetry."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, Self

Kind = Literal["internal", "server", "client"]
Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]

NO_ATTRIBUTES: Attributes = MappingProxyType({})
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TracingUnavailable(Exception):
    """Traces cannot be exported; the message says why, and what to do."""


class Span:
    """An operation, and what goes on within it. This class records nothing: it is what is not traced."""

    __slots__ = ()

    is_recorded: ClassVar[bool] = False

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, or "" for no trace."""
        return ""

    def span(self, name: str, attributes: Attributes = NO_ATTRIBUTES, kind: Kind = "internal") -> "Span":
        """An operation within this one, which begins now. As a context manager it ends with its block."""
        return self

    def record(self, name: str, began: float, ended: float, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """An operation within this one that is over; times are those of `time.monotonic()`."""

    def rename(self, name: str) -> None:
        """Give it another name, which is known only now."""

    def set(self, attributes: Attributes) -> None:
        """Add attributes, or replace them."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Something that happens now."""

    def link(self, other: "Span") -> None:
        """Another span, perhaps of another trace, that this one depends on."""

    def fail(self, reason: str) -> None:
        """Mark it as failed. `reason` is a name of few: a class of errors or a code, never a message."""

    def headers(self) -> dict[str, str]:
        """The headers with which a request to another server continues the trace; they replace the client's."""
        return {}

    def end(self) -> None:
        """End it. Later ends have no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.fail(kind.__name__)
        self.end()


NO_SPAN = Span()


class Tracing:
    """Begins traces. This class begins none."""

    is_on: ClassVar[bool] = False

    def begin(
        self, headers: Mapping[str, str], name: str, attributes: Attributes = NO_ATTRIBUTES, kind: Kind = "server"
    ) -> Span:
        """The first span of a request in this process; it continues the trace that the headers name."""
        return NO_SPAN


NO_TRACING = Tracing()


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A span of another process (W3C Trace Context, section 3.2); the ids are hexadecimal."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parse_traceparent(text: str) -> TraceParent | None:
    """What the header says; None if it is not as W3C specifies."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & 1))
