"""Which entries there are: pages of them by model, namespace, age and hits, and those that were asked much the same.

Two implementations pass one contract suite: redis_index.py, which workers and hosts share, and memory_index.py, of one
process without Redis.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from cache.entries.entry import Entry
from cache.entries.generations import Purge

MAX_PAGE = 500


class InvalidCursor(ValueError):
    """A cursor that no page has given."""


class EntryFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which entries are asked for. Times are Unix seconds, when answers were computed."""

    model: str = ""
    namespace: str = ""
    since: float = 0.0
    until: float = float("inf")
    min_hits: int = 0
    """With 1 or more, and with `hottest`, only what was served, the most often first; else the newest first."""
    hottest: bool = False

    @property
    def by_hits(self) -> bool:
        return self.hottest or self.min_hits > 0


class Page(NamedTuple):
    """Ids in their order, and the cursor from which the next page goes on; None after the last one."""

    ids: Sequence[str]
    next: str | None


class EntryIndex(Protocol):
    """All raise StoreUnavailable, but for `stored` and `hit`, which wait for nothing."""

    def stored(self, entry: Entry) -> None:
        """An entry was stored."""

    def hit(self, entry_id: str) -> None:
        """An entry was served."""

    async def flush(self) -> None:
        """Let everybody see what was stored and served."""

    async def page(self, wanted: EntryFilter, cursor: str | None, limit: int) -> Page:
        """At most `limit` ids of entries that are wanted, but for `model` where `namespace` or hits are asked for as
        well: the caller looks at the entries. Some may be gone. Raises InvalidCursor.
        """

    async def asked_like(self, namespace: str, question: bytes, limit: int) -> Sequence[str]:
        """Ids of entries of a namespace with this question."""

    async def elsewhere(self, entry_id: str, limit: int) -> Sequence[str]:
        """At most `limit` other namespaces with an answer to the same request, of 250 that are looked at, at random."""

    async def hits(self, ids: Sequence[str]) -> Sequence[int]:
        """How often each was served."""

    async def in_semantic(self, ids: Sequence[str]) -> Sequence[bool]:
        """Whether the semantic cache has each: it may be the answer to a similar question."""

    async def counts(self) -> Mapping[str, int]:
        """Entries by model; some may be gone."""

    async def ages(self, bounds: Sequence[float], now: float) -> Sequence[int]:
        """How many entries are at most so many seconds old, for each bound (ascending), and older than the one before;
        last, how many are older than all.
        """

    async def sizes(self, sample: int) -> Sequence[int]:
        """Bytes of some entries, chosen at random."""

    async def forget(self, ids: Sequence[str]) -> None:
        """Entries are gone."""

    def discard(self, purge: Purge) -> None:
        """Entries are gone, as another process has said: what waits here is not written."""

    async def purged(self, purge: Purge) -> None:
        """Entries are gone."""
