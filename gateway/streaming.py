"""Server-sent events, as OpenAI-compatible servers use them (WHATWG HTML, section 9.2)."""

import re
from typing import Any

import msgspec

_decode = msgspec.json.Decoder().decode
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")


class EventSplitter:
    """Cuts bytes into whole events, each with the blank line that ends it."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data
        if b"\r" in data:
            return self._feed_with_returns(data)
        *events, self._rest = data.split(b"\n\n")
        return [event + b"\n\n" for event in events]

    def _feed_with_returns(self, data: bytes) -> list[bytes]:
        # A return at the very end may be half of a line break: it waits for what follows.
        whole = data[:-1] if data.endswith(b"\r") else data
        events: list[bytes] = []
        start = 0
        for match in _BLANK_LINE.finditer(whole):
            events.append(data[start : match.end()])
            start = match.end()
        self._rest = data[start:]
        return events

    def flush(self) -> bytes:
        """Give up the event that has begun, and hand it over as it is."""
        rest, self._rest = self._rest, b""
        return rest

    @property
    def rest(self) -> bytes:
        """An event that has begun and not ended."""
        return self._rest


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
