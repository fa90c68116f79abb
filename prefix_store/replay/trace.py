"""A trace, of any format."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TraceRequest(NamedTuple):
    """One request: `keys` are numbers, one for each block of its prompt; equal numbers mean equal prefixes."""

    time: float
    """Seconds since the first request."""
    input_length: int
    """Tokens."""
    output_length: int
    """Tokens."""
    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """A valid trace. `requests` starts again with each call; keys may be made while they are read."""

    style: str
    block_tokens: int
    count: int
    """How many requests there are."""
    requests: Callable[[], Iterator[TraceRequest]]
    has_prefixes: bool = True
    """Whether the prompts' shared prefixes are known; if not, the keys are empty."""


class TraceError(Exception):
    """A file is no trace. `lines` has a message for each bad line, with what is expected."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)
