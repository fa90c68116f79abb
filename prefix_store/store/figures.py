"""What a store has done, for its operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from prefix_store.store.fetch_plan import FetchDecision


@dataclass(slots=True)
class StoreFigures:
    """Counts since the start, of blocks by place unless the name says otherwise."""

    restored: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)
    """Decided to be fetched, whether or not that worked."""
    computed: Counter[str] = field(default_factory=Counter)
    """Were there, and computing them was expected to be sooner."""
    late: int = 0
    """Fetches that were ended by their deadline."""
    offered: int = 0
    kept: Counter[str] = field(default_factory=Counter)

    def note(self, choices: tuple[FetchDecision, ...]) -> None:
        """Adds what was decided."""
        for choice in choices:
            (self.fetched if choice.fetched else self.computed)[choice.place] += choice.blocks
