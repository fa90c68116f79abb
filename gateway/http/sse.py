"""Server-sent events (WHATWG HTML, section 9.2), and newline-delimited JSON, as they arrive from upstreams."""

import re
from typing import Any

import msgspec

EVENT_STREAM = "text/event-stream"

_decode = msgspec.json.Decoder().decode
# A run of them ends one event: millions of empty ones would cost a second.
_BLANK_LINES = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2,}")
_MAX_BLANK_LINE = 4
_LINE_END = re.compile(rb"\n[\r\n]*")


class EventSplitter:
    """Cuts bytes into whole events, each with the blank lines that end it, in time linear in their number."""

    __slots__ = ("_rest", "_scanned")

    def __init__(self) -> None:
        self._rest = bytearray()
        self._scanned = 0  # bytes of `_rest` in which no blank line ends

    def feed(self, data: bytes) -> list[bytes]:
        if not self._rest and data.endswith(b"\n\n") and b"\r" not in data and b"\n\n\n" not in data:
            # The common case: whole events.
            return [event + b"\n\n" for event in data[:-2].split(b"\n\n")]
        rest = self._rest
        rest += data
        # A final CR may be half of a CRLF: it waits for the next bytes.
        end = len(rest) - 1 if rest.endswith(b"\r") else len(rest)
        events: list[bytes] = []
        start = 0
        at = self._scanned
        while (match := _BLANK_LINES.search(rest, at, end)) is not None:
            at = match.end()
            events.append(bytes(rest[start:at]))
            start = at
        del rest[:start]
        self._scanned = max(0, len(rest) - _MAX_BLANK_LINE)
        return events

    def flush(self) -> bytes:
        """Return the incomplete event and start over."""
        rest, self._rest, self._scanned = bytes(self._rest), bytearray(), 0
        return rest

    @property
    def rest(self) -> bytes:
        """An event that has begun and not ended."""
        return bytes(self._rest)

    def __len__(self) -> int:
        """Bytes of the event that has begun."""
        return len(self._rest)


class LineSplitter(EventSplitter):
    """Cuts newline-delimited JSON into whole lines, each with the line breaks that end it."""

    __slots__ = ()

    def feed(self, data: bytes) -> list[bytes]:
        rest = self._rest
        rest += data
        start = 0
        lines: list[bytes] = []
        while (match := _LINE_END.search(rest, max(start, self._scanned))) is not None:
            lines.append(bytes(rest[start : match.end()]))
            start = match.end()
        del rest[:start]
        self._scanned = len(rest)
        return lines


def event_data(event: bytes) -> bytes:
    """The data of an event; empty for a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def event_json(data: bytes) -> dict[str, Any]:
    """The object an event carries. Raises ValueError for anything else."""
    try:
        value = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"an event is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("an event is not a JSON object")
    return value
