"""Times as Anthropic and Ollama write them: RFC 3339, with up to nine digits of a second."""

import math
from datetime import UTC, datetime
from typing import Any

_LAST_SECOND = 253_402_300_799
"""Of the year 9999."""


def rfc3339(seconds: Any) -> str:
    """Unix time in UTC, with the digits of the second that are not zero. What is no such time is the year 1970."""
    if type(seconds) not in (int, float) or not 0 <= seconds <= _LAST_SECOND:
        seconds = 0
    whole = int(seconds)
    fraction = f".{min(round((seconds - whole) * 1e9), 999_999_999):09}".rstrip(".0")
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}{fraction}Z"


def unix_seconds(text: Any) -> int:
    """The inverse, rounded down; 0 for what is no time."""
    try:
        time = datetime.fromisoformat(text)
        return math.floor((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())
    except (TypeError, ValueError, OverflowError):
        return 0
