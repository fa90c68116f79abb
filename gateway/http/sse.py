"""Server-sent events (WHATWG HTML, section 9.2), and newline-delimited JSON, as they arrive from upstreams."""

import re
from typing import Any

import msgspec

EVENT_STREAM = "text/event-stream"

_decode = msgspec.json.Decoder().decode
_check = msgspec.json.Decoder(msgspec.Raw).decode
# A run of them ends one event: millions of empty ones would cost a second.
_BLANK_LINES = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2,}")
_MAX_BLANK_LINE = 4
_LINE_END = re.compile(rb"\n[\r\n]*")
# A comment, a field or nothing. Clients ignore fields of other names, and a byte order mark.
_FIELD_LINE = re.compile(rb"(?:\xef\xbb\xbf)?(?:[\w-]*:|(?:data|event|id|retry)?\Z)")


class NotAnEvent(Exception):
    """What a stream carries in place of an event."""


class EventSplitter:
    """Cuts bytes into whole events, each with the blank lines that end it, in time linear in their number."""

    __slots__ = ("_rest", "_scanned")

    def __init__(self) -> None:
        self._rest = bytearray()
        self._scanned = 0  # bytes of `_rest` in which no blank line ends

    def feed(self, data: bytes) -> list[bytes]:
        if not self._rest and data.endswith(b"\n\n") and b"\r" not in data:
            # The common cases: an event of one line, and whole events. Counting bytes is faster than finding pairs.
            if data.count(b"\n") == 2:
                return [data]
            if b"\n\n\n" not in data:
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

    def check(self, event: bytes) -> None:
        """Raises NotAnEvent for what says something else than a JSON object or [DONE]. A comment says nothing."""
        data = event_data(event)
        if data:
            if data != b"[DONE]":
                _check_object(data)
        elif not all(map(_FIELD_LINE.match, event.splitlines())):
            raise NotAnEvent

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

    def check(self, event: bytes) -> None:
        """Raises NotAnEvent for a line that is no JSON object. An empty one says nothing."""
        if event.strip():
            _check_object(event)

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


def splitter_of(content_type: str) -> EventSplitter:
    """For a stream of this type, which is that of events or of lines."""
    return EventSplitter() if content_type == EVENT_STREAM else LineSplitter()


def event_data(event: bytes) -> bytes:
    """The data of an event; empty for a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def _check_object(data: bytes) -> None:
    if not data.lstrip().startswith(b"{"):
        raise NotAnEvent
    try:
        _check(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotAnEvent from error
    except RecursionError:
        pass  # too deep to be looked at


def event_json(data: bytes) -> dict[str, Any]:
    """The object an event carries. Raises ValueError for anything else."""
    try:
        value = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"an event is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("an event is not a JSON object")
    return value
