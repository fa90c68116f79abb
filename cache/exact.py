"""The exact cache: memory in front of Redis, one purge state, four kinds of outcome."""

import asyncio
import logging
import time
from collections.abc import Callable

from cache.entry import Entry
from cache.errors import StoreUnavailable
from cache.generations import Generations, Purge, Scope, new_purge
from cache.key import Key, namespace_of
from cache.memory import MemoryStore
from cache.redis_store import RedisStore
from cache.results import Failed, Hit, Miss, Tier

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_SWEEP_BATCH = 2_000


class ExactCache:
    """Answers by the key of their request.

    `keep_stale` is how many seconds an entry stays after its lifetime, for requests and failures that accept it.
    """

    def __init__(
        self,
        memory: MemoryStore,
        redis: RedisStore | None,
        keep_stale: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.memory = memory
        self.redis = redis
        self._keep_stale = keep_stale
        self._clock = clock
        self._generations = Generations()
        # Without Redis this process's own view is all there is; with it, entries there cannot be judged
        # before the purges have been read.
        self._knows_purges = redis is None

    def generation(self, namespace: str, model: str) -> str:
        """What an entry of a request that begins now must carry."""
        return self._generations.current(namespace, model)

    def counts(self, entry: Entry) -> bool:
        """Whether the entry is from after the last purge that concerns it."""
        return entry.generation == self._generations.current(namespace_of(entry.id), entry.model)

    async def lookup(self, key: Key) -> Hit | Miss | Failed:
        if hit := self._in_memory(key):
            return hit
        if self.redis is None:
            return Miss()
        if not self._knows_purges:
            return Failed("redis: purges are not known yet")
        try:
            entry = await self.redis.get(key.id)
        except StoreUnavailable as error:
            return self._in_memory(key) or Failed(str(error))
        if entry is None or not self._answers(entry, key):
            # The answer may have been computed while Redis was being asked.
            return self._in_memory(key) or Miss(("memory", "redis"))
        await self.memory.put(entry, self._keep_for(entry))
        return self._hit(entry, "redis")

    async def store(self, entry: Entry) -> None:
        """Keep the entry in every tier. Raises StoreUnavailable when Redis takes none; memory has it all the same."""
        if not self.counts(entry):
            return
        keep_for = self._keep_for(entry)
        await self.memory.put(entry, keep_for)
        if self.redis is not None:
            await self.redis.put(entry, keep_for)

    async def entry(self, entry_id: str) -> Entry | None:
        """The entry with this id, whoever asks. Raises StoreUnavailable."""
        entry = await self.memory.get(entry_id)
        if entry is None and self.redis is not None:
            entry = await self.redis.get(entry_id)
        return entry if entry and self.counts(entry) else None

    async def delete(self, entry_id: str) -> bool:
        """Forget one entry everywhere; False when there was none. Raises StoreUnavailable."""
        in_memory = await self.memory.delete(entry_id)
        in_redis = await self.redis.delete(entry_id) if self.redis is not None else False
        return in_memory or in_redis

    async def purge(self, scope: Scope, name: str = "") -> None:
        """Make every entry of the scope count no more, in all workers. Raises StoreUnavailable.

        Even then the purge holds in this process.
        """
        purge = new_purge(scope, name)
        self._generations.apply(purge)
        await self._sweep()
        if self.redis is not None:
            await self.redis.purge(purge)

    async def learn_purges(self) -> None:
        """Take over the purge state of Redis. Raises StoreUnavailable."""
        if self.redis is not None:
            changed = self._generations.replace(await self.redis.generations())
            self._knows_purges = True
            if changed:
                await self._sweep()

    async def follow_purges(self) -> None:
        """Apply the purges and deletions of other workers as they happen; runs for as long as the cache is used."""
        if self.redis is None:
            return
        position = ""
        while True:
            try:
                position, events = await self.redis.purges_since(position)
                for event in events:
                    if isinstance(event, Purge):
                        self._generations.apply(event)
                    else:
                        await self.memory.delete(event)
                if events:
                    await self._sweep()
                else:
                    await self.learn_purges()
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_SECONDS)
                await self.redis.breaker.wait_closed()

    async def _sweep(self) -> None:
        """Free the memory of entries that no longer count, a few thousand at a time."""
        for number, entry_id in enumerate(self.memory.ids()):
            entry = self.memory.peek(entry_id)
            if entry is not None and not self.counts(entry):
                await self.memory.delete(entry_id)
            if number % _SWEEP_BATCH == _SWEEP_BATCH - 1:
                await asyncio.sleep(0)

    def _in_memory(self, key: Key) -> Hit | None:
        slot = self.memory.slot(key.id)
        return self._hit(slot.entry, "memory") if slot and self._answers(slot.entry, key) else None

    def _answers(self, entry: Entry, key: Key) -> bool:
        return entry.proof == key.proof and self.counts(entry)

    def _hit(self, entry: Entry, tier: Tier) -> Hit:
        age = entry.age(self._clock())
        return Hit(entry, tier, age, stale=age >= entry.fresh_for)

    def _keep_for(self, entry: Entry) -> float:
        return entry.fresh_for + self._keep_stale - entry.age(self._clock())
