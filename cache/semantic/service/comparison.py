"""A fresh answer on its way to the judge."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.semantic.service.inquiries import Inquiry
from cache.semantic.service.neighbours import Vector
from cache.semantic.service.records import Record


@dataclass(slots=True, eq=False)
class Comparison:
    """What a fresh answer, `text`, may be compared with: the answers of `others`, as they were computed then.

    First that which was or would have been served, then the nearest.

    `record` and its `vector` are what the fresh answer is found by; `record.answer` is its own entry until the judge
    has found it to say what others say. `inquiry` is the question as it was asked. `judged` is set when there is
    nothing more to wait for.
    """

    record: Record
    vector: Vector
    text: str
    others: Sequence[Record]
    inquiry: Inquiry | None
    judged: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_audit(self) -> bool:
        """Whether it tells what became of an answer that was served."""
        return self.inquiry is not None and self.inquiry.decision.audit
