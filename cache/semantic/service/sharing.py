"""Applies what other processes learned: everything at the start, and then each change.

Vectors of another embedding model are of no use here: theirs are computed anew, in the background.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable

from cache.errors import StoreUnavailable
from cache.semantic.embedding.encoder import Vector
from cache.semantic.embedding.errors import EmbeddingFailed
from cache.semantic.service.learner import Learner
from cache.semantic.service.lookups import Latest
from cache.semantic.service.record_log import Event, RecordLog
from cache.semantic.service.records import Record
from cache.stores.redis_replies import is_after

log = logging.getLogger(__name__)

_SAVE_SECONDS = 30.0
_REEMBEDDED_AT_ONCE = 16
_TRIES = 3


class Sharing:
    """Keeps this process's records and policy in sync with all others.

    `report_wrong_answer` is called with an entry whose served answer was wrong, maybe here.
    """

    def __init__(self, shared: RecordLog, learner: Learner, report_wrong_answer: Callable[[str], object]) -> None:
        self.shared = shared
        self._neighbours = learner.neighbours
        self._labels = learner.labels
        self._lookups = learner.lookups
        self._embedder = learner.embedder
        self._report_wrong_answer = report_wrong_answer
        self._seen: Latest[str, int] = Latest()
        self._position = "0-0"
        self._loaded_at = "0-0"
        self._saved = (0, time.monotonic())
        self.loaded = False
        self._began = time.time()
        # The entries whose records have no vector of this model yet, and when their answers were computed.
        self._incomplete: set[tuple[str, float]] = set()
        self._has_incomplete = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._reembedded = self._unembeddable = 0

    def reembedding(self) -> dict[str, int]:
        """Records that another embedding model has stored: how many lack a vector, have got one, and get none."""
        return {"left": len(self._incomplete), "done": self._reembedded, "failed": self._unembeddable}

    async def follow(self) -> None:
        """Runs for as long as the cache is used; what cannot be read now is read when Redis is back."""
        while True:
            try:
                await self.shared.make_room(self._labels.name)
                if not self.loaded:
                    await self._load()
                while True:
                    await self._apply(await self.shared.since(self._position))
                    if time.monotonic() - self._saved[1] >= _SAVE_SECONDS:
                        await self.save()
                        await self.shared.sweep()
            except StoreUnavailable:
                await self.shared.wait_available()

    async def save(self) -> None:
        """Stores the policy's state. Raises StoreUnavailable."""
        count = self._labels.count
        if count != self._saved[0]:
            await self.shared.keep_learned(self._labels.name, self._position, self._labels.snapshot())
        self._saved = (count, time.monotonic())

    async def _load(self) -> None:
        """In this order: an event that comes while records are read is applied after them."""
        learned = await self.shared.learned(self._labels.name)
        if learned is not None and self._labels.restore(learned[1]):
            self._position = learned[0]
        self._loaded_at = await self.shared.newest()
        began = time.monotonic()
        async for page in self.shared.load():
            await self._take_over(page)
        self.loaded = True
        log.info("%d answered questions from redis in %.1f s", len(self._neighbours.records), time.monotonic() - began)

    async def _apply(self, events: list[tuple[str, Event | None]]) -> None:
        news = [
            event
            for position, event in events
            if event is not None and event.origin != self.shared.origin and is_after(position, self._loaded_at)
        ]
        # Only the last change of an entry counts.
        last = {event.entry: event.kind for event in news if event.kind in ("put", "remove")}
        put = [entry for entry, kind in last.items() if kind == "put"]
        await self._take_over(await self.shared.records(put))  # after a failure they are read again
        await self._neighbours.remove(last.keys() - put)
        for event in news:
            if event.kind == "wrong":
                self._report_wrong_answer(event.entry)
        for position, each in events:
            # Of one that was written twice, since the first reply was lost, the second has no new number.
            if each is not None and each.kind == "label" and each.number > self._seen.get(each.origin, 0):
                self._seen[each.origin] = each.number
                self._labels.take(each.label)
            self._position = position

    async def _take_over(self, records: list[tuple[Record, Vector | None]]) -> None:
        valid = [(record, vector) for record, vector in records if record.expires > time.time()]
        await self._neighbours.put(valid)
        self._incomplete.update((record.entry, record.created) for record, vector in valid if vector is None)
        if self._incomplete:
            self._has_incomplete.set()

    async def reembed(self) -> None:
        """Computes the vectors that records lack, and stores them; runs for as long as the cache is used."""
        while True:
            await self._has_incomplete.wait()
            await self._lookups.yield_to_lookups()
            # The order of a set differs between processes, so that each computes a part.
            some = list(itertools.islice(self._incomplete, _REEMBEDDED_AT_ONCE))
            try:
                await self._complete([entry for entry, _ in some])
            except StoreUnavailable:
                await self.shared.wait_available()
                continue
            self._incomplete.difference_update(some)
            if not self._incomplete:
                self._has_incomplete.clear()
                log.info("%d questions were embedded anew", self._reembedded)

    async def _complete(self, entries: list[str]) -> None:
        """Raises StoreUnavailable."""
        # Read again: another process may have computed some.
        stored = await self.shared.records([entry for entry in entries if self._neighbours.records.get(entry)])
        await self._neighbours.complete([(record, vector) for record, vector in stored if vector is not None])
        lacking = [record for record, vector in stored if vector is None]
        async with asyncio.TaskGroup() as tasks:
            found = [(record, tasks.create_task(self._embedded(record.text))) for record in lacking]
        computed = [(record, vector) for record, task in found if (vector := task.result()) is not None]
        self._unembeddable += len(lacking) - len(computed)
        for record, vector in await self._neighbours.complete(computed):
            self._reembedded += 1
            if record.created < self._began:  # else it is of a process that runs now, with the other model
                self.shared.save(record, vector, replaces=True, announced=False)

    async def _embedded(self, text: str) -> Vector | None:
        """None if the model gives no vector of this text; waits while its server is down."""
        with contextlib.suppress(EmbeddingFailed):
            return await self._embedder.embed(text)
        async with self._one_at_a_time:  # of texts that failed together, maybe one was at fault
            tries = 0
            while tries < _TRIES:
                try:
                    return await self._embedder.embed(text)
                except EmbeddingFailed:
                    tries += not self._embedder.model.breaker.is_open
                    await self._embedder.model.breaker.wait_closed()
        return None
