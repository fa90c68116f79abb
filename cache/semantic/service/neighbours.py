"""The neighbours of a question, and which tenants may get their answers."""

import asyncio
import functools
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from cache.semantic.embedding.encoder import Vector
from cache.semantic.index.index import VectorIndex
from cache.semantic.policy.policy import NEIGHBOURS, Evidence
from cache.semantic.service.records import Record, Records
from cache.semantic.wording.comparison import TextComparison, compare
from cache.semantic.wording.language import language_of
from cache.semantic.wording.text import Text

T = TypeVar("T")

# Some kilobytes each; reading one again takes a tenth of a millisecond.
_TEXTS_KEPT = 16_384
# Entries in all, and compared ones: a search takes half a millisecond, as long as a switch to the thread and back.
_SEARCHED_AT_ONCE = 20_000
_COMPARED_AT_ONCE = 2_000
AT_ONCE = 16
"""Records that come or go while lookups wait: their normal forms take a millisecond."""
_PUBLISHED_PREFIX = "*"


class Neighbour(NamedTuple):
    record: Record
    similarity: float


class Candidate(NamedTuple):
    """The answer of a question's neighbours that the policy means, after a comparison of their texts.

    `neighbour` is the one whose question vouches for it. Where a `veto` forbids the answer, it is the nearest that has
    it, and `evidence` has nothing of their texts. `vetoes` are those of `evidence.members`, "" for none.
    """

    neighbour: Neighbour
    evidence: Evidence
    veto: str
    vetoes: tuple[str, ...]


class Neighbours:
    """Records and their vectors, kept consistent with each other.

    `is_current` says whether a record is from after the last purge of its tenant and model. Records of the tenants in
    `published` may answer all tenants, once `confirmations` other tenants got the same fresh answer. `removed` is told
    the entries that are kept no more.
    """

    def __init__(
        self,
        index: VectorIndex,
        is_current: Callable[[Record], bool] = lambda record: True,
        published: Sequence[str] = (),
        confirmations: int = 1,
        removed: Callable[[Collection[str]], None] = lambda entries: None,
    ) -> None:
        self.records = Records()
        self.index = index
        self._is_current = is_current
        self._published = frozenset(published)
        self._confirmations = confirmations
        self._removed = removed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="index")

    async def put(self, records: Sequence[tuple[Record, Vector | None]]) -> None:
        """Add records; those without a vector are found by their normal form only, until `complete` brings it."""
        for start in range(0, len(records), AT_ONCE):
            some = [(self.records.put(record), vector) for record, vector in records[start : start + AT_ONCE]]
            await self._run(self._add, [(record, vector) for record, vector in some if vector is not None])

    async def complete(self, records: Sequence[tuple[Record, Vector]]) -> list[tuple[Record, Vector]]:
        """Adds the vectors of records that are still kept, and returns these."""
        found = ((self.records.change(record.entry, record.created), vector) for record, vector in records)
        kept = [(record, vector) for record, vector in found if record is not None]
        await self._run(self._add, kept)
        return kept

    async def remove(self, entries: Collection[str]) -> None:
        for entry in entries:
            self.records.remove(entry)
        self._removed(frozenset(entries))
        await self._run(self._drop, entries)

    async def near(self, partition: str, vector: Vector) -> list[Neighbour]:
        """The sixteen nearest records of a partition and the sixteen nearest published ones of its context; nearest
        first.
        """
        if len(self.index) <= _SEARCHED_AT_ONCE and self.index.unlisted(partition) <= _COMPARED_AT_ONCE:
            found = self._search(partition, vector)
        else:
            found = await self._run(self._search, partition, vector)
        near: dict[str, Neighbour] = {}
        for entry, similarity in found:
            record = self.records.get(entry.removeprefix(_PUBLISHED_PREFIX))
            if record is not None and self._is_current(record):
                near.setdefault(record.entry, Neighbour(record, similarity))
        return sorted(near.values(), key=lambda neighbour: -neighbour.similarity)

    def same_form(self, partition: str, text: str) -> Record | None:
        """The record of the same question, written differently."""
        record = self.records.of_same_form(partition, text, time.time())
        return record if record is not None and self._is_current(record) else None

    def may_answer(self, record: Record, namespace: str) -> bool:
        """Whether the answer of a record may go to a tenant."""
        return record.namespace == namespace or (
            record.namespace in self._published and len(record.confirmed) >= self._confirmations
        )

    def confirm(self, record: Record, namespace: str) -> Record | None:
        """Notes that another tenant than the record's got the same fresh answer.

        Returns the record, None if nothing changed.
        """
        kept = self.records.get(record.entry)
        if kept is None or namespace in kept.confirmed or len(kept.confirmed) >= self._confirmations:
            return None
        return self.records.change(record.entry, record.created, confirmed=(*kept.confirmed, namespace))

    async def bound(self, most: int) -> None:
        """Removes what has expired, and the least recently used ones here until `most` are left."""
        while gone := self.records.expired(time.time(), AT_ONCE):
            await self.remove(gone)
        while len(self.records) > most and (oldest := self.records.oldest()) is not None:
            await self.remove([oldest])

    def close(self) -> None:
        """End the threads. A running search ends first."""
        self._thread.shutdown(cancel_futures=True)
        self.index.close()

    def _add(self, records: Sequence[tuple[Record, Vector]]) -> None:
        for record, vector in records:
            self.index.add(record.partition, record.entry, vector, record.expires)
            if record.namespace in self._published:
                self.index.add(
                    _published_partition(record.partition), _PUBLISHED_PREFIX + record.entry, vector, record.expires
                )
            # Not during a lookup. Of a million at the start, which come in full batches, only some fit.
            if len(records) < AT_ONCE or _read.cache_info().currsize < _TEXTS_KEPT:
                _read_ahead(record.text)

    def _drop(self, entries: Collection[str]) -> None:
        for entry in entries:
            self.index.remove(entry)
            self.index.remove(_PUBLISHED_PREFIX + entry)

    def _search(self, partition: str, vector: Vector) -> list[tuple[str, float]]:
        now = time.time()
        found = self.index.search(partition, vector, NEIGHBOURS, now)
        if self._published:
            found = found + self.index.search(_published_partition(partition), vector, NEIGHBOURS, now)
        return found

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _published_partition(partition: str) -> str:
    """The partition of the index with the published records of all tenants, in the same context."""
    return f"{_PUBLISHED_PREFIX}.{partition.partition('.')[2]}"


def compare_texts(text: str, questions: Sequence[str]) -> TextComparison:
    """How `text` compares with questions that have one answer."""
    return compare(_read(text), [_read(question) for question in questions])


def candidate_of(text: str, near: Sequence[Neighbour], evidence: Evidence) -> Candidate:
    """Compares `text` with the questions that have the answer of `evidence`."""
    place, veto, features, vetoes = compare_texts(text, [near[member].record.text for member in evidence.members])
    neighbour = near[evidence.members[place or 0]]
    if not veto:  # its similarity is that of the question that vouches, which need not be the nearest with the answer
        evidence = evidence.with_texts(features)._replace(similarity=neighbour.similarity)
    return Candidate(neighbour, evidence, veto, vetoes)


_read = functools.lru_cache(maxsize=_TEXTS_KEPT)(Text.of)


def _read_ahead(text: str) -> None:
    language_of(_read(text).written)
