"""The index of one namespace, as one process uses it.

match ─► read ─► refresh_claims, or remove_claims for what a holder lacks
own ─► publish, touch, forget, in the background, in order
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prefix_store.errors import IndexUnavailable
from prefix_store.identity.fingerprint import DIGEST_BYTES
from prefix_store.index.connection import IndexConnection
from prefix_store.index.layout import check_keys, packed_names
from prefix_store.index.local_owner import FORGET_SECONDS, CodecInventory, LocalOwner
from prefix_store.index.match import Match, match_of
from prefix_store.index.node import RedisNode
from prefix_store.index.owner import Details, Owner, TierKind, owners_of
from prefix_store.index.writes import BLOCKS_AT_ONCE, Write, WriteQueue

log = logging.getLogger(__name__)

DEADLINE = 0.02
HEARTBEAT_SECONDS = 1.0
LIFETIME_SECONDS = 5.0
CLAIM_SECONDS = 3600
_BACKGROUND_DEADLINE = 2.0
_FLUSH_SECONDS = 2.0
_RETRY_DELAY = 0.2
_BLOCKS_PER_LOOK = 4096
_NODES_EVERY = 30


class RedisIndex:
    """The index; made by `open_index`.

    No method raises because of Redis: a failed read finds nothing, and writes that Redis does not take wait, or are
    dropped and counted (`dropped`).
    """

    def __init__(
        self, connection: IndexConnection, deadline: float, heartbeat: float, lifetime: float, claim_seconds: int
    ) -> None:
        self.connection = connection
        self._deadline = deadline
        self._heartbeat_seconds = heartbeat
        self._lifetime = lifetime
        self._claim_seconds = claim_seconds
        self._writes = WriteQueue(connection, claim_seconds, self._distrust_all)
        self._owned: dict[LocalOwner, asyncio.Task[None]] = {}
        self._owners: Mapping[int, Owner] = {}
        self._heartbeat_waiters: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._complaint = ""
        self.failed_matches = 0

    @property
    def dropped(self) -> int:
        """Blocks whose writes were dropped."""
        return self._writes.dropped

    @property
    def owners(self) -> Mapping[int, Owner]:
        """The live owners by epoch, as of the last heartbeat."""
        return self._owners

    async def match(self, keys: Sequence[bytes]) -> Match:
        """The longest prefix of these blocks that live owners hold, and which; empty in an outage.

        `keys` are those of a prompt, in order. One round trip for up to 4,096 blocks, and another for as many more if
        all were found; so one prompt never occupies Redis for long, and replies before an outage count.
        """
        runs: list[int | bytes] = []
        due = asyncio.get_running_loop().time() + self._deadline
        try:
            for start in range(0, len(keys), _BLOCKS_PER_LOOK):
                piece = keys[start : start + _BLOCKS_PER_LOOK]
                left = due - asyncio.get_running_loop().time()
                names = packed_names(self.connection.block_names, piece)
                found: list[int | bytes] = await self.connection.ask("match", names, deadline=left)
                runs += found
                if sum(blocks for blocks in found[::2] if isinstance(blocks, int)) < len(piece):
                    break
        except IndexUnavailable:
            self.failed_matches += 1
        return match_of(runs, self._owners)

    def remove_claims(self, owner: Owner, keys: Sequence[bytes]) -> None:
        """An owner does not have blocks that it claims: withdraws these claims."""
        check_keys(keys)
        for start in range(0, len(keys), BLOCKS_AT_ONCE):
            self._writes.add(Write("withdraw", owner, tuple(keys[start : start + BLOCKS_AT_ONCE])))

    def refresh_claims(self, owner: Owner, keys: Sequence[bytes]) -> None:
        """An owner's blocks were used: extends the claims."""
        check_keys(keys)
        for start in range(0, len(keys), BLOCKS_AT_ONCE):
            self._writes.add(Write("touch", owner, tuple(keys[start : start + BLOCKS_AT_ONCE])))

    def own(
        self,
        name: str,
        tier: TierKind,
        inventory: Callable[[], Iterable[CodecInventory]],
        details: Callable[[], Details] = Details,
        lasting: bool = False,
    ) -> LocalOwner:
        """Announces an owner of this process; see `LocalOwner`. Raises ValueError for an empty name."""
        owner = LocalOwner(name, tier, inventory, details, lasting, self.connection, self._writes, self._wake.set)
        claiming = asyncio.create_task(owner.claim_inventory(self._claim_seconds / 2))
        claiming.add_done_callback(_report_end)
        self._owned[owner] = claiming
        self._wake.set()
        return owner

    async def disown(self, owner: LocalOwner) -> None:
        """Stops announcing an owner. Unless it is `lasting`, its claims end."""
        task = self._owned.pop(owner, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            await owner.retire(_BACKGROUND_DEADLINE)

    async def flush(self) -> None:
        """Returns when all queued writes have reached Redis, or are lost."""
        await self._writes.flush()

    async def next_heartbeat(self) -> None:
        """Returns after a complete heartbeat: every local owner has an epoch, and the others are known.

        For a start that waits for the index; waits while Redis is unavailable.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heartbeat_waiters.append(waiter)
        self._wake.set()
        await waiter

    async def heartbeat(self) -> None:
        """Announces the local owners and reads the others; runs while the index is used."""
        for number in itertools.count():
            self._wake.clear()
            waiters = tuple(self._heartbeat_waiters)
            try:
                await self._heartbeat(learn_nodes=number % _NODES_EVERY == 0)
            except IndexUnavailable as error:
                self._log_once(str(error))
                await self._pause(_RETRY_DELAY)
                continue
            self._complaint = ""
            for waiter in waiters:
                self._heartbeat_waiters.remove(waiter)
                if not waiter.done():  # else the waiter was cancelled
                    waiter.set_result(None)
            await self._pause(self._heartbeat_seconds)

    async def _heartbeat(self, learn_nodes: bool) -> None:
        for owner in tuple(self._owned):
            await owner.announce(self._lifetime, _BACKGROUND_DEADLINE)
        forget = FORGET_SECONDS * 1000
        self._owners = owners_of(await self.connection.probe("owners", forget, deadline=_BACKGROUND_DEADLINE))
        if learn_nodes:
            await self.connection.learn_nodes(_BACKGROUND_DEADLINE)

    async def write_behind(self) -> None:
        """Sends queued writes; runs while the index is used."""
        await self._writes.write_behind()

    async def close(self) -> None:
        """Sends queued writes, for two seconds at most, and disowns the owners."""
        try:
            async with asyncio.timeout(_FLUSH_SECONDS):
                if self.connection.is_available:
                    await self.flush()
        except TimeoutError:
            log.warning("redis was not told of the last blocks in time")
        for owner in tuple(self._owned):
            await self.disown(owner)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._wake.wait())]
                if self.connection.is_available:
                    waits.append(asyncio.ensure_future(self.connection.wait_unavailable()))
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
        except TimeoutError:
            return

    def _log_once(self, reason: str) -> None:
        """Log once why Redis refuses a call; the connection logs when it does not answer."""
        if self.connection.is_available and reason != self._complaint:
            log.warning("the prefix index cannot be used: %s", reason)
            self._complaint = reason

    def _distrust_all(self) -> None:
        for owner in self._owned:
            owner.start_new_epoch()


@asynccontextmanager
async def open_index(
    url: str,
    namespace: bytes,
    *,
    deadline: float = DEADLINE,
    heartbeat: float = HEARTBEAT_SECONDS,
    lifetime: float = LIFETIME_SECONDS,
    claim_seconds: int = CLAIM_SECONDS,
) -> AsyncIterator[RedisIndex]:
    """The index of the namespace with this fingerprint (16 bytes) in the Redis at `url`.

    `url` is redis://, rediss:// or unix://, of a single server or of any node of a Redis Cluster, or one with several
    hosts: redis+cluster:// or, with the name of the master, redis+sentinel:// (see servers.py); it need not be
    reachable. A match takes at most `deadline` seconds. Owners announce themselves every `heartbeat` seconds and count
    as dead `lifetime` seconds after that. A claim that is neither repeated nor used expires after `claim_seconds`.
    Raises ValueError for invalid arguments.
    """
    if len(namespace) != DIGEST_BYTES:
        raise ValueError(f"the namespace has {len(namespace)} bytes, expected the 16 of a fingerprint")
    if not 0 < heartbeat < lifetime:
        raise ValueError(f"heartbeat is {heartbeat:g} s, expected less than the lifetime of {lifetime:g} s")
    if deadline <= 0 or claim_seconds < 1:
        raise ValueError("deadline and claim_seconds: expected more than 0, and at least 1")
    node = RedisNode(url)
    index = RedisIndex(IndexConnection(node, namespace), deadline, heartbeat, lifetime, claim_seconds)
    background = [asyncio.create_task(work) for work in (index.heartbeat(), index.write_behind())]
    for task in background:
        task.add_done_callback(_report_end)
    try:
        yield index
    finally:
        await index.close()
        for task in background:
            task.cancel()
        await asyncio.wait(background)
        await node.close()


def _report_end(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the background work of the prefix index ended", exc_info=error)
