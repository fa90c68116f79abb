"""What a trace says, whatever its form."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TraceRequest(NamedTuple):
    """One request: `keys` are numbers, one for each block of its prompt; equal numbers mean equal beginnings."""

    time: float
    """Seconds since the first request."""
    input_length: int
    """Tokens."""
    output_length: int
    """Tokens."""
    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was found right. `requests` begins anew with each call; their keys may be made as they are read."""

    style: str
    block_tokens: int
    count: int
    """How many requests there are."""
    requests: Callable[[], Iterator[TraceRequest]]
    has_prefixes: bool = True
    """Whether anything is said about what prompts share; without it the keys are empty."""


class TraceError(Exception):
    """A file is no trace. `lines` says for each bad line what is wrong and what would be right."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)
