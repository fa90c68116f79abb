"""A fresh answer on its way to the judge."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.semantic.service.neighbours import Vector
from cache.semantic.service.queries import Query
from cache.semantic.service.records import Record


@dataclass(slots=True, eq=False)
class Comparison:
    """What a fresh answer, `text`, may be compared with: the answers of `others`, as they were computed then.

    First that which was or would have been served, then the nearest.

    `record` and its `vector` are what the fresh answer is found by; `record.answer` is its own entry until the judge
    has found it to say what others say. `query` is the question as it was asked. `judged` is set when there is
    nothing more to wait for.
    """

    record: Record
    vector: Vector
    text: str
    others: Sequence[Record]
    query: Query | None
    judged: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_audit(self) -> bool:
        """Whether it tells what became of an answer that was served."""
        return self.query is not None and self.query.decision.audit


_FIRST = 500.0


class JudgeBudget:
    """Limits calls of the judge: `share` comparisons for each fresh answer, and 500 more to begin with.

    Args:
        share: infinite for a judge without cost.
    """

    def __init__(self, share: float) -> None:
        self.is_short = share < 1.0
        self._share = share
        self._left = _FIRST

    def earn(self) -> None:
        """Account for a fresh answer."""
        self._left = min(_FIRST, self._left + self._share)

    def take(self) -> bool:
        """Take one comparison; False if none is left."""
        has_some = self._left >= 1.0
        self._left -= has_some
        return has_some
