"""Sliding windows over a text that is longer than what a model sees at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens ``begin`` to ``end`` of a text, a sequence of its own; those from ``scored`` on have not been scored yet.

    begin                 scored            end
      | context of the stride | scored once  |
    """

    begin: int
    scored: int
    end: int


def windows(tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Windows of at most ``size`` tokens, each ``stride`` further on, the last one up to the end of the text.

    Every token but the first, which has nothing before it, is scored in exactly one of them: after at least
    ``size - stride`` others, where there are so many. It is how transformers' guide to perplexity has it.

    Args:
        stride: 1 to ``size - 1``, so that no window begins with a token that is to be scored.
    """
    begin, scored = 0, 1
    while scored < tokens:
        end = min(begin + size, tokens)
        yield Window(begin, scored, end)
        begin, scored = begin + stride, end
