"""The exact cache: memory in front of Redis, one purge state, four kinds of outcome."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from cache.entries.entry import Entry, Tag
from cache.entries.generations import Generations, Purge, Scope, is_of_tag, new_purge, purge_before, purge_of
from cache.entries.key import Key, namespace_of
from cache.entries.outcomes import Failed, Hit, Miss, Tier
from cache.errors import StoreUnavailable
from cache.index.entry_index import EntryIndex
from cache.index.memory_index import MemoryIndex
from cache.index.redis_index import RedisIndex
from cache.stores.erasure import Erased, erase_namespace
from cache.stores.memory import MemoryStore
from cache.stores.redis_replies import is_after
from cache.stores.redis_store import RedisStore

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
# After so long a token that a known purge has replaced is no reading from the moment before the purge.
_UNDONE_SECONDS = 0.1
# More purged namespaces and models than this end in a purge of everything, more tags in one of all that has a tag.
_MAX_SCOPES = 10_000
_MAX_TAGS = 10_000
_SWEEP_BATCH = 200


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
        self.index: EntryIndex = MemoryIndex(memory) if redis is None else RedisIndex(redis)
        self._generations = Generations()
        # Purges that Redis has not heard of, by scope.
        self._unpublished: dict[str, Purge] = {}
        self._deletions = 0
        # How often Redis had been away when its purges were last read: entries there cannot be judged before the
        # first reading, nor after an outage before the next.
        self._purges_read_at: int | None = None

    def generation(self, namespace: str, model: str) -> str:
        """What an entry of a request that begins now must carry."""
        return self._generations.current(namespace, model)

    def tagged(self, names: Iterable[str]) -> tuple[Tag, ...]:
        """The tags that an entry of a request that begins now must carry."""
        return self._generations.tagged(names)

    @property
    def purges(self) -> int:
        """Changes whenever a purge becomes known."""
        return self._generations.changes

    def counts(self, entry: Entry) -> bool:
        """Whether the entry is from after the last purge that concerns it."""
        generations = self._generations
        is_current = entry.generation == generations.current(namespace_of(entry.id), entry.model)
        return (
            is_current
            and entry.created >= generations.before
            and (not entry.tags or generations.are_current(entry.tags))
        )

    async def lookup(self, key: Key) -> Hit | Miss | Failed:
        """The answer to the request with this key."""
        return await self._look(key.id, key.proof)

    def in_memory(self, key: Key) -> Hit | None:
        """The answer to a request, if this process has it; nothing is waited for, and no other tier is asked."""
        return self._in_memory(key.id, key.proof)

    async def lookup_by_id(self, entry_id: str) -> Hit | Miss | Failed:
        """The entry with this id, whatever request it was the answer to."""
        return await self._look(entry_id, None)

    async def _look(self, entry_id: str, proof: bytes | None) -> Hit | Miss | Failed:
        if hit := self._in_memory(entry_id, proof):
            return hit
        if self.redis is None:
            return Miss()
        if not self._knows_purges():
            return Failed("redis: purges are not known yet")
        deletions = self._deletions
        try:
            entry = await self.redis.get(entry_id)
        except StoreUnavailable as error:
            return self._in_memory(entry_id, proof) or Failed(str(error))
        if entry is None or not self._answers(entry, entry_id, proof):
            # The answer may have been computed while Redis was being asked.
            return self._in_memory(entry_id, proof) or Miss(("memory", "redis"))
        if deletions == self._deletions:  # else it may be this entry that was deleted meanwhile
            await self.memory.put(entry, self._keep_for(entry))
        return self._hit(entry, "redis")

    async def store(self, entry: Entry) -> None:
        """Keep the entry in every tier. Raises StoreUnavailable when Redis takes none; memory has it all the same."""
        if not self.counts(entry):
            return
        keep_for = self._keep_for(entry)
        await self.memory.put(entry, keep_for)
        self.index.stored(entry)
        if self.redis is not None:
            await self.redis.put(entry, keep_for)

    async def entries(self, entry_ids: Sequence[str]) -> list[Entry]:
        """Those of these entries that count, of any tenant, in this order. The index forgets the others.

        Raises StoreUnavailable.
        """
        if self.redis is None:
            now = self._clock()
            known = [self.memory.peek(entry_id) for entry_id in entry_ids]
            return [each for each in known if each and self.counts(each) and self._keep_for(each, now) > 0]
        if not self._knows_purges():
            raise StoreUnavailable("redis: purges are not known yet")
        found = {entry.id: entry for entry in await self.redis.get_many(entry_ids) if entry and self.counts(entry)}
        if gone := [entry_id for entry_id in entry_ids if entry_id not in found]:
            await self.index.forget(gone)
        return list(found.values())

    async def entry(self, entry_id: str) -> Entry | None:
        """The entry with this id, of any tenant, for who inspects it. Raises StoreUnavailable."""
        entry = await self.memory.get(entry_id)
        if entry is None and self.redis is not None:
            if not self._knows_purges():
                raise StoreUnavailable("redis: purges are not known yet")
            (entry,) = await self.redis.get_many([entry_id])
        return entry if entry and self.counts(entry) else None

    async def delete(self, entry_id: str) -> bool:
        """Forget one entry everywhere; False when there was none. Raises StoreUnavailable."""
        self._deletions += 1
        in_memory = await self.memory.delete(entry_id)
        in_redis = await self.redis.delete(entry_id) if self.redis is not None else False
        with contextlib.suppress(StoreUnavailable):  # who comes upon its id in the index forgets it
            await self.index.forget([entry_id])
        return in_memory or in_redis

    async def purge(self, scope: Scope, name: str = "") -> None:
        """Make every entry of the scope count no more, in all workers. Raises StoreUnavailable.

        Even then the purge holds in this process, and the others hear of it once Redis is back.
        """
        await self._purge(new_purge(scope, name))
        if self.redis is None and self._generations.purged_tags > _MAX_TAGS:
            await self._purge_tags()

    async def purge_before(self, time: float, layer: str = "") -> None:
        """Make every answer that was computed before `time`, Unix seconds, count no more, as `purge` does.

        With a layer it is no answer to similar questions any more, and stays what it is in the exact cache.
        """
        # An earlier time would take the place of a later one in Redis until a worker that knows both tells it again.
        await self._purge(purge_before(max(time, self._generations.purged_before(layer)), layer))

    def are_current(self, tags: Sequence[Tag]) -> bool:
        """Whether none of these has been purged since its request began."""
        return self._generations.are_current(tags)

    def purged_before(self, layer: str) -> float:
        """Unix time before which no answer counts in a layer, by a purge of it or by age."""
        return max(self._generations.before, self._generations.purged_before(layer))

    async def _purge(self, purge: Purge) -> None:
        self._generations.apply(purge)
        if self.redis is not None:
            self._unpublished[purge.field] = purge
        await self._sweep()
        if self.redis is not None:
            await self._publish(self.redis, purge)
        with contextlib.suppress(StoreUnavailable):
            await self.index.purged(purge)

    async def erase(self, namespace: str) -> Erased:
        """Purge a namespace, then remove what is stored of it here and in Redis, and look again.

        Others that share the Redis free their memory as they hear of the purge. Raises StoreUnavailable.
        """
        in_memory = self._count(namespace)
        await self.purge("namespace", namespace)
        left = self._count(namespace)
        if self.redis is None:
            return Erased(in_memory, in_memory - left, left)
        in_redis = await erase_namespace(self.redis, namespace)
        left = self._count(namespace)
        return Erased(
            in_memory + in_redis.found, max(0, in_memory - left) + in_redis.removed, left + in_redis.remaining
        )

    def _count(self, namespace: str) -> int:
        return sum(namespace_of(entry_id) == namespace for entry_id in self.memory.ids())

    async def sync_purges(self) -> None:
        """Take over the purge state of Redis, and tell it what it does not know. Raises StoreUnavailable."""
        if self.redis is None:
            return
        outages = self.redis.breaker.times_opened
        while True:
            for purge in list(self._unpublished.values()):
                await self._publish(self.redis, purge)
            changes = self._generations.changes
            tokens = await self.redis.generations()
            if changes == self._generations.changes:  # else they may be older than what is known here
                break
        news = self._generations.merge(tokens)
        lost = self._generations.missing_from(tokens)
        had_outage, self._purges_read_at = self._purges_read_at != outages, outages
        if news:
            await self._sweep()
        if lost:
            await self.redis.restore_generations(lost)
        for later in self._generations.later_than(tokens):
            await self._publish(self.redis, later)
        if undone := self._generations.undone_in(tokens):
            await self._purge_again(self.redis, undone)
        if had_outage:
            await self.redis.repeat_deletions()
        tags = sum(map(is_of_tag, tokens))
        if len(tokens) - tags > _MAX_SCOPES:
            log.warning("more than %d namespaces and models have been purged: everything is, once", _MAX_SCOPES)
            await self.purge("all")
        elif tags > _MAX_TAGS:
            await self._purge_tags()

    async def _purge_tags(self) -> None:
        log.warning("more than %d tags have been purged: all answers with tags are, once", _MAX_TAGS)
        await self._purge(new_purge("tags"))

    async def _purge_again(self, redis: RedisStore, undone: Mapping[str, str]) -> None:
        """Repeats purges that Redis has forgotten, as a failover to a replica can make it.

        With new tokens: another worker may have purged the same scope since then. Raises StoreUnavailable.
        """
        await asyncio.sleep(_UNDONE_SECONDS)
        still = self._generations.undone_in(await redis.generations())
        for field in undone.items() & still.items():
            log.warning("redis has lost a purge, which is repeated: %s", field[0])
            await self._purge(purge_of(field[0]))

    async def keep_index(self) -> None:
        """Write the index and look for entries that are gone; runs for as long as the cache is used."""
        if isinstance(self.index, RedisIndex):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.index.write_behind())
                tasks.create_task(self.index.sweep_forever())

    async def follow_purges(self) -> None:
        """Apply the purges and deletions of other workers as they happen; runs for as long as the cache is used."""
        if self.redis is not None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_purges_after_outages(self.redis))
                tasks.create_task(self._follow(self.redis))

    async def _publish(self, redis: RedisStore, purge: Purge) -> None:
        await redis.purge(purge)
        # Purges of this scope that were read while this one was on its way came before it.
        self._generations.apply(purge)
        if self._unpublished.get(purge.field) is purge:
            del self._unpublished[purge.field]

    async def _read_purges_after_outages(self, redis: RedisStore) -> None:
        while True:
            await redis.breaker.wait_closed()
            try:
                if not self._knows_purges():
                    await self.sync_purges()
                await redis.breaker.wait_opened()
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _follow(self, redis: RedisStore) -> None:
        position = ""
        while True:
            try:
                before = position
                position, events = await redis.purges_since(position)
                for event in events:
                    if isinstance(event, Purge):
                        self._generations.apply(event)
                        self.index.discard(event)
                    else:
                        self._deletions += 1
                        redis.note_deletion(event)
                        await self.memory.delete(event)
                if events:
                    await self._sweep()
                if not events or is_after(before, position):
                    await self.sync_purges()
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_SECONDS)
                await redis.breaker.wait_closed()

    async def _sweep(self) -> None:
        """Free the memory of entries that no longer count, a few thousand at a time."""
        if self.redis is not None:
            self.redis.discard_writes(lambda entry: not self.counts(entry))
        for number, entry_id in enumerate(self.memory.ids()):
            entry = self.memory.peek(entry_id)
            if entry is not None and not self.counts(entry):
                await self.memory.delete(entry_id)
            if number % _SWEEP_BATCH == _SWEEP_BATCH - 1:
                await asyncio.sleep(0)

    def _knows_purges(self) -> bool:
        return self.redis is None or self._purges_read_at == self.redis.breaker.times_opened

    def _in_memory(self, entry_id: str, proof: bytes | None) -> Hit | None:
        slot = self.memory.slot(entry_id)
        return self._hit(slot.entry, "memory") if slot and self._answers(slot.entry, entry_id, proof) else None

    def _answers(self, entry: Entry, entry_id: str, proof: bytes | None) -> bool:
        return entry.id == entry_id and proof in (None, entry.proof) and self.counts(entry)

    def _hit(self, entry: Entry, tier: Tier) -> Hit:
        age = entry.age(self._clock())
        return Hit(entry, tier, age, stale=age >= entry.fresh_for)

    def _keep_for(self, entry: Entry, now: float | None = None) -> float:
        return entry.fresh_for + self._keep_stale - entry.age(self._clock() if now is None else now)
