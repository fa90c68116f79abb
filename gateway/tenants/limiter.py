"""Holds requests to the limits of their keys and teams: docs/decisions/027-limits.md.

A hit takes a permit that this process has leased. A miss takes one that is leased for all limits of the key and its
team; Redis admits more than one at once only far from the limits.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from cache.errors import StoreUnavailable
from cache.stores.redis_store import RedisStore
from gateway.errors import CacheUnavailable, RateLimited
from gateway.http.background_tasks import background_tasks
from gateway.settings.limits import KeySettings
from gateway.tenants.admission import UNLIMITED, Admission, LocalAdmission, Reservation
from gateway.tenants.caller import Caller
from gateway.tenants.local_share import first_refusal
from gateway.tenants.scope import NANO, REQUESTS, Refusal, Scope
from gateway.tenants.scripts import run_script
from gateway.tenants.usage import LEASE_SECONDS, MOST_MISSES, SLOT_SECONDS, AdmittedMiss, Batch, Lease, Usage, usage_of
from gateway.tenants.virtual_key import VirtualKey

log = logging.getLogger(__name__)

_WORKERS = "keepgate:workers"
# Of an admission and of its repetitions while Redis is not away.
_DEADLINES = (0.05, 0.2, 1.0)
_PROBE_SECONDS = 0.25
# More at once would only delay each other, and look like a slow Redis.
_TURNS = 8
_BACKGROUND_DEADLINE = 2.0
# A limit may be raised, and permits may come back.
_REMEMBERED_SECONDS = 1.0
_HEARTBEAT_SECONDS = 5.0
_DEAD_AFTER_SECONDS = 15.0
_UPKEEP_SECONDS = 0.5
_FORGOTTEN_AFTER_SECONDS = 120.0
_GATHER_SECONDS = 0.02
_PAUSE_AFTER_FAILURE = 0.1
_MOST_TRIES = 20
_MOST_FREED_AT_ONCE = 100

_encode = msgspec.json.Encoder().encode
_Delivery = tuple[tuple[Scope, ...], Batch, int]


class Limiter:
    """Make one with `open_limiter`."""

    def __init__(self, redis: RedisStore | None, settings: KeySettings) -> None:
        self._redis = redis
        self._is_closed = settings.without_redis == "closed"
        self._worker = secrets.token_hex(6)
        self._workers = 1
        self._usages: dict[str, Usage] = {}
        self._numbers = itertools.count(1)
        self._with_news: dict[int, Usage] = {}
        self._has_news = asyncio.Event()
        self._delivery: _Delivery | None = None
        self._delivering = asyncio.Lock()
        self._outage = 0
        self._outage_since = 0.0
        self._turns: asyncio.Queue[int] = asyncio.Queue()
        for turn in range(_TURNS):
            self._turns.put_nowait(turn)

    def take_hit(self, caller: Caller) -> bool | None:
        """Whether a hit may be served: None if Redis must be asked, by `admit_hit`, which also tells a refusal."""
        usage = self._usage_of(caller.key)
        if usage is None or not usage.chunk:
            return True
        now = time.monotonic()
        if usage.take_permit(now):
            return True
        return False if usage.remembered(now) else None

    async def admit_hit(self, caller: Caller) -> None:
        """Take the permit of a hit. Raises RateLimited, and CacheUnavailable with Redis away if that is `closed`."""
        usage = self._usage_of(caller.key)
        if usage is not None and usage.chunk:
            await self._take_permit(usage)

    async def admit(self, caller: Caller, prompt_tokens: int, max_output_tokens: int, dollars: float) -> Admission:
        """Reserve what a miss may use, by estimates; it is settled and released once.

        Raises RateLimited, BudgetExceeded, and CacheUnavailable with Redis away if that is `closed`.
        """
        usage = self._usage_of(caller.key)
        if usage is None:
            return UNLIMITED
        if usage.limits_requests_only:
            await self._take_permit(usage)
            return UNLIMITED
        tokens, money = prompt_tokens + max_output_tokens, round(dollars * NANO)
        try:
            admitted = usage.take_miss(tokens, money) or await self._lease_misses(usage, tokens, money)
        except StoreUnavailable as error:
            return self._admit_locally(usage, tokens, money, error)
        return Reservation(usage, self._report, admitted)

    def end_leases(self) -> None:
        """Give back what is leased and not used."""
        for usage in self._usages.values():
            if usage.return_permits() | usage.end_lease():
                self._report(usage)

    async def flush(self) -> None:
        """Return when Redis knows what was used so far, however long it is away."""
        while self._delivery or self._with_news:
            await self._deliver_next()

    async def run(self) -> None:
        """Tell Redis what was used, renew what is held, and count workers; runs as long as requests are admitted."""
        if self._redis is not None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._deliver_forever())
                tasks.create_task(self._keep_up())
                tasks.create_task(self._beat(self._redis))

    # A key's usage in this process

    def _usage_of(self, key: VirtualKey | None) -> Usage | None:
        """None for a caller without limits."""
        if key is None:
            return None
        usage = self._usages.get(key.id)
        if usage is None or usage.key is not key:
            usage = self._usage_of_new(key, usage)
        return usage if usage.scopes else None

    def _usage_of_new(self, key: VirtualKey, former: Usage | None) -> Usage:
        """The usage of a key that was read again, perhaps with other limits."""
        if former is not None and (former.key.limits, former.key.team_limits) == (key.limits, key.team_limits):
            former.key = key
            return former
        usage = self._usages[key.id] = usage_of(key)
        if former is not None:
            usage.slots, usage.reserved = former.slots, former.reserved
            if former.return_permits() | former.end_lease():
                self._report(former)
        return usage

    # Asking Redis

    async def _lease_misses(self, usage: Usage, tokens: int, money: int) -> AdmittedMiss:
        """Lease misses and take one of them. While one request leases, others ask for themselves alone."""
        if usage.is_leasing:
            return usage.take_from(await self._ask_for_misses(usage, 1, tokens, money))
        usage.is_leasing = True
        try:
            has_returned = usage.end_lease()
            if has_returned:
                self._report(usage)
            wanted = usage.wanted
            try:
                lease = await self._ask_for_misses(usage, wanted, tokens, money)
            except RateLimited:
                if not has_returned or not await self._is_flushed():
                    raise
                usage.refused = None  # perhaps for what has been given back since
                lease = await self._ask_for_misses(usage, 1, tokens, money)
        finally:
            usage.is_leasing = False
        usage.lease = lease
        usage.wanted = min(2 * wanted, MOST_MISSES) if lease.granted == wanted else lease.granted
        admitted = usage.take_from(lease)
        if self._usages.get(usage.key.id) is not usage and usage.end_lease():  # its limits were changed meanwhile
            self._report(usage)
        return admitted

    async def _ask_for_misses(self, usage: Usage, wanted: int, tokens: int, money: int) -> Lease:
        name = f"{self._worker}.{next(self._numbers)}"
        try:
            reply = await self._ask(usage, wanted, (1, tokens, money, name))
        except RateLimited:
            raise
        except BaseException:  # Redis may have got the request
            usage.wanted = 1
            if usage.limits_slots:
                usage.free(f"{name}.{number}" for number in range(1, wanted + 1))
                self._report(usage)
            raise
        return Lease(name, tokens, money, reply)

    async def _is_flushed(self) -> bool:
        """Whether Redis could be told what was used."""
        try:
            async with asyncio.timeout(_DEADLINES[-1]):
                await self.flush()
        except TimeoutError:
            return False
        return True

    async def _take_permit(self, usage: Usage) -> None:
        if usage.chunk == 1:
            await self._lease_permits(usage)
            return
        async with usage.refilling:  # one asks for all that wait
            if not usage.take_permit(time.monotonic()):
                await self._lease_permits(usage)

    async def _lease_permits(self, usage: Usage) -> None:
        """Lease permits and take one of them."""
        if usage.return_permits():
            self._report(usage)
        try:
            _, second, _, granted, *_ = await self._ask(usage, usage.chunk, (0, 0, 0, ""))
        except StoreUnavailable as error:
            self._refuse_without_redis(error)
            if refusal := first_refusal(list(usage.local_shares()), self._workers, None, 0):
                raise refusal.error() from error
            return
        if granted > 1:
            usage.permits, usage.permits_second = granted - 1, second
            usage.permits_until = time.monotonic() + LEASE_SECONDS

    async def _ask(self, usage: Usage, wanted: int, miss: tuple[int | str, ...]) -> list[int]:
        """The reply of admit.lua that admits. Raises RateLimited, BudgetExceeded, StoreUnavailable."""
        if self._redis is None:
            raise StoreUnavailable("there is no Redis")
        usage.last_used = time.monotonic()
        keys = [key for scope in usage.scopes for key in scope.keys]
        numbers = [number for scope in usage.scopes for number in scope.numbers]
        lease = round(SLOT_SECONDS * 1000)
        turn = await self._turns.get()
        try:
            if refusal := usage.remembered(time.monotonic()):
                raise refusal.error()
            call = (f"{self._worker}.{turn}", next(self._numbers))
            arguments = (
                len(usage.scopes),
                wanted,
                *miss,
                lease,
                *call,
                *numbers,
                *usage.batch.freed[-_MOST_FREED_AT_ONCE:],
            )
            reply: list[int] = await self._run_admit(self._redis, keys, arguments)
        finally:
            self._turns.put_nowait(turn)
        usage.is_away = False
        if reply[0]:
            raise self._refused(usage, reply).error()
        if miss[0]:
            usage.spent = list(zip(reply[6::4], reply[7::4], strict=True))
        return reply

    async def _run_admit(self, redis: RedisStore, keys: list[str], arguments: tuple[str | int, ...]) -> list[int]:
        for deadline in _DEADLINES:
            try:
                reply: list[int] = await run_script(redis, "admit", keys, arguments, deadline)
                return reply
            except StoreUnavailable as error:
                # A busy process was late, or its connections were taken: that must not suspend limits.
                failure = error
                if await self._is_away(redis):
                    break
        raise failure

    async def _is_away(self, redis: RedisStore) -> bool:
        """Whether Redis is away: the breaker is open, and has been for longer than a probe takes."""
        loop = asyncio.get_running_loop()
        while True:
            if redis.breaker.times_opened != self._outage:
                self._outage, self._outage_since = redis.breaker.times_opened, loop.time()
            due = self._outage_since + _PROBE_SECONDS
            is_early = loop.time() < due
            try:
                async with asyncio.timeout_at(due):
                    await redis.breaker.wait_closed()
                return False
            except TimeoutError:
                if not is_early or loop.time() < due + _PROBE_SECONDS:
                    return True
                self._outage_since = loop.time()  # this process was held up: so was the probe

    def _refused(self, usage: Usage, reply: list[int]) -> Refusal:
        number, which, wait, used = reply
        refusal = Refusal(usage.scopes[number - 1], which, wait / 1000, used)
        # Fewer tokens may pass, and a slot may become free at any time.
        if which == REQUESTS:
            usage.refused, usage.refused_at = refusal, time.monotonic()
            usage.refused_until = usage.refused_at + min(refusal.wait, _REMEMBERED_SECONDS)
        return refusal

    # With Redis away

    def _admit_locally(self, usage: Usage, tokens: int, money: int, error: StoreUnavailable) -> Admission:
        self._refuse_without_redis(error)
        shares = list(usage.local_shares())
        if refusal := first_refusal(shares, self._workers, tokens, money):
            raise refusal.error() from error
        return LocalAdmission(usage, self._report, tuple(share for _, share, _ in shares), money)

    def _refuse_without_redis(self, error: StoreUnavailable) -> None:
        if self._is_closed:
            raise CacheUnavailable("Limits cannot be checked now: the shared store does not answer.") from error

    # Telling Redis

    def _report(self, usage: Usage) -> None:
        self._with_news[id(usage)] = usage
        self._has_news.set()

    async def _deliver_forever(self) -> None:
        while True:
            await self._has_news.wait()
            await self._deliver_next()
            # The first news is told at once; the pause gathers those of a busy gateway into one call for each key.
            await asyncio.sleep(0 if self._with_news else _GATHER_SECONDS)

    async def _deliver_next(self) -> None:
        """Deliver the oldest news; what is not delivered stays, under its number, and counts once."""
        async with self._delivering:
            if self._delivery is None:
                usage = self._with_news.pop(next(iter(self._with_news), 0), None)
                if usage is None:
                    self._has_news.clear()
                    return
                batch, usage.batch = usage.batch, Batch()
                self._delivery = usage.scopes, batch, next(self._numbers)
            await self._deliver(*self._delivery)
            self._delivery = None

    async def _deliver(self, scopes: tuple[Scope, ...], batch: Batch, number: int) -> None:
        if self._redis is None:
            return
        keys = [key for scope in scopes for key in scope.keys]
        numbers = [limit for scope in scopes for limit in scope.numbers]
        lease = round(SLOT_SECONDS * 1000)
        arguments: tuple[str | bytes | int, ...] = (len(scopes), _encode(batch), self._worker, number, lease, *numbers)
        for _ in range(_MOST_TRIES):
            await self._redis.breaker.wait_closed()
            try:
                await run_script(self._redis, "settle", keys, arguments, _BACKGROUND_DEADLINE)
                return
            except StoreUnavailable as error:
                failure = error
                await asyncio.sleep(_PAUSE_AFTER_FAILURE)
        log.error("what %s used is not counted: %s", " and ".join(scope.name for scope in scopes), failure)

    # Time passes

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(_UPKEEP_SECONDS)
            now = time.monotonic()
            for key_id, usage in list(self._usages.items()):
                is_over = now >= usage.permits_until and usage.return_permits()
                if usage.lease is not None and now >= usage.lease.until:
                    is_over |= usage.end_lease()
                if usage.renew(now) or is_over:
                    self._report(usage)
                if not (usage.slots or usage.reserved) and now - usage.last_used > _FORGOTTEN_AFTER_SECONDS:
                    del self._usages[key_id]

    async def _beat(self, redis: RedisStore) -> None:
        """Say that this worker is alive, and hear how many are."""
        dead_after = round(_DEAD_AFTER_SECONDS * 1000)
        while True:
            try:
                arguments = (self._worker, dead_after)
                self._workers = await run_script(redis, "heartbeat", (_WORKERS,), arguments, _BACKGROUND_DEADLINE)
            except StoreUnavailable:
                await redis.breaker.wait_closed()  # until then the last number counts
            await asyncio.sleep(_HEARTBEAT_SECONDS)


@asynccontextmanager
async def open_limiter(redis: RedisStore | None, settings: KeySettings) -> AsyncIterator[Limiter]:
    """A limiter; what was used is told to Redis before it is gone."""
    limiter = Limiter(redis, settings)
    async with background_tasks() as tasks:
        if settings.required:
            tasks.keep(limiter.run)
        yield limiter
    limiter.end_leases()
    try:
        async with asyncio.timeout(_BACKGROUND_DEADLINE):
            await limiter.flush()
    except TimeoutError:
        log.warning("redis did not hear in time what the last requests used")
