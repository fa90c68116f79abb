"""The index of one process without Redis: its memory tier has all entries, and is looked through when somebody asks."""

import asyncio
import heapq
import itertools
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from cache.entries.entry import Entry
from cache.entries.generations import Purge
from cache.entries.key import namespace_of
from cache.index.entry_index import EntryFilter, InvalidCursor, Page
from cache.index.fingerprint import decode_fingerprint
from cache.stores.memory import MemoryStore

_SPARE_HITS = 1000


class MemoryIndex:
    """An `EntryIndex` over a memory store, in another thread where that takes long."""

    def __init__(self, memory: MemoryStore) -> None:
        self._memory = memory
        self._hits: dict[str, int] = {}

    def stored(self, entry: Entry) -> None:
        if len(self._hits) > 2 * len(self._memory) + _SPARE_HITS:
            self._hits = {entry_id: hits for entry_id, hits in self._hits.items() if self._memory.peek(entry_id)}

    def hit(self, entry_id: str) -> None:
        self._hits[entry_id] = self._hits.get(entry_id, 0) + 1

    async def flush(self) -> None:
        """Nothing waits."""

    async def page(self, wanted: EntryFilter, cursor: str | None, limit: int) -> Page:
        last: tuple[float, str] | None = None
        if cursor is not None:
            score, _, entry_id = cursor.partition(" ")
            try:
                last = (float(score), entry_id)
            except ValueError as error:
                raise InvalidCursor(cursor) from error
        entries, hits = self._memory.entries(), dict(self._hits) if wanted.by_hits else {}

        def find() -> Page:
            scored = (
                (float(hits.get(entry.id, 0)) if wanted.by_hits else entry.created, entry.id)
                for entry in entries
                if _is_wanted(entry, wanted, hits)
            )
            found = heapq.nlargest(limit + 1, (pair for pair in scored if last is None or pair < last))
            page = found[:limit]
            more = f"{page[-1][0]!r} {page[-1][1]}" if len(found) > limit else None
            return Page([entry_id for _, entry_id in page], more)

        return await asyncio.to_thread(find)

    async def asked_like(self, namespace: str, question: bytes, limit: int) -> Sequence[str]:
        entries = self._memory.entries()

        def find() -> list[str]:
            found = []
            for entry in reversed(entries):
                if namespace_of(entry.id) == namespace and question in entry.asked:
                    known = decode_fingerprint(entry.asked)
                    if known is not None and known.question == question:
                        found.append(entry.id)
                        if len(found) == limit:
                            break
            return found

        return await asyncio.to_thread(find)

    async def elsewhere(self, entry_id: str, limit: int) -> Sequence[str]:
        namespace, _, request = entry_id.partition(".")
        ids = (each.partition(".") for each in self._memory.ids())
        found = (other for other, _, theirs in ids if theirs == request and other != namespace)
        return list(itertools.islice(found, limit))

    async def hits(self, ids: Sequence[str]) -> Sequence[int]:
        return [self._hits.get(entry_id, 0) for entry_id in ids]

    async def in_semantic(self, ids: Sequence[str]) -> Sequence[bool]:
        """Without Redis the semantic cache keeps its records to itself."""
        return [False] * len(ids)

    async def counts(self) -> Mapping[str, int]:
        return Counter(entry.model for entry in self._memory.entries())

    async def ages(self, bounds: Sequence[float], now: float) -> Sequence[int]:
        counts = [0] * (len(bounds) + 1)
        for entry in self._memory.entries():
            counts[bisect_left(bounds, now - entry.created)] += 1
        return counts

    async def sizes(self, sample: int) -> Sequence[int]:
        entries = self._memory.entries()
        return [len(entry.body) for entry in random.sample(entries, min(sample, len(entries)))]

    async def forget(self, ids: Sequence[str]) -> None:
        for entry_id in ids:
            self._hits.pop(entry_id, None)

    def discard(self, purge: Purge) -> None:
        """Nothing waits."""

    async def purged(self, purge: Purge) -> None:
        """The memory tier forgets the entries itself."""


def _is_wanted(entry: Entry, wanted: EntryFilter, hits: Mapping[str, int]) -> bool:
    return (
        wanted.model in ("", entry.model)
        and wanted.namespace in ("", namespace_of(entry.id))
        and wanted.since <= entry.created <= wanted.until
        and (not wanted.by_hits or hits.get(entry.id, 0) >= max(1, wanted.min_hits))
    )
