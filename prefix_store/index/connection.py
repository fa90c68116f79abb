"""Calls to Redis with a deadline; none while Redis is known to be unavailable."""

import asyncio
import logging
from typing import Any

from redis.exceptions import ClusterError, ReadOnlyError, RedisError, ResponseError

from prefix_store.errors import IndexUnavailable
from prefix_store.index.layout import key_names
from prefix_store.index.node import RedisNode, Word
from prefix_store.index.scripts import ScriptName, script

log = logging.getLogger(__name__)

# More calls than this at once only delay each other.
_AT_ONCE = 32


class IndexConnection:
    """Runs a namespace's scripts on its node.

    After a failure every call fails at once, except the heartbeat's, whose first success makes the connection available
    again. If Redis freezes, the requests in flight wait one deadline, and later ones do not wait. If this process was
    late, not Redis, the next heartbeat corrects that in one round trip.
    """

    def __init__(self, node: RedisNode, namespace: bytes) -> None:
        self._node = node
        self._keys = key_names(namespace)
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._available = asyncio.Event()
        self._available.set()
        self._unavailable = asyncio.Event()
        self.times_unavailable = 0

    @property
    def block_names(self) -> bytes:
        """The prefix of the names of all blocks."""
        return self._keys[2]

    @property
    def is_available(self) -> bool:
        return self._available.is_set()

    async def wait_available(self) -> None:
        await self._available.wait()

    async def wait_unavailable(self) -> None:
        await self._unavailable.wait()

    async def ask(self, name: ScriptName, *args: Word, deadline: float) -> Any:
        """A script's reply within `deadline` seconds. Raises IndexUnavailable, at once in an outage."""
        if not self.is_available:
            raise IndexUnavailable("redis is unavailable")
        return await self._within(deadline, name, args)

    async def probe(self, name: ScriptName, *args: Word, deadline: float) -> Any:
        """As `ask`, also during an outage, which a reply ends. Raises IndexUnavailable."""
        if not self.is_available:
            await self._node.disconnect()
        reply = await self._within(deadline, name, args)
        if not self.is_available:
            log.warning("redis (prefix index) is available again")
            self._unavailable.clear()
            self._available.set()
        return reply

    async def learn_nodes(self, deadline: float) -> None:
        """Lists the cluster's nodes. Raises IndexUnavailable."""
        try:
            async with asyncio.timeout(deadline):
                await self._node.learn_nodes()
        except (RedisError, OSError, TimeoutError) as error:
            raise IndexUnavailable(f"redis: {_reason(error)}") from error

    async def _within(self, deadline: float, name: ScriptName, args: tuple[Word, ...]) -> Any:
        asked = False
        try:
            async with asyncio.timeout(deadline), self._slots:
                asked = True
                return await self._node.run(script(name), self._keys, *args)
        except (RedisError, OSError, TimeoutError) as error:
            # A call that did not get a slot is no outage, nor is the refusal of one command.
            if asked and _is_outage(error):
                self._mark_unavailable(error)
            raise IndexUnavailable(f"redis: {name}: {_reason(error)}") from error

    def _mark_unavailable(self, error: Exception) -> None:
        if self.is_available:
            self.times_unavailable += 1
            self._available.clear()
            self._unavailable.set()
            log.warning("redis (prefix index) is unavailable (%s); going on without it", _reason(error))


def _is_outage(error: Exception) -> bool:
    return not isinstance(error, ResponseError) or isinstance(error, ReadOnlyError | ClusterError)


def _reason(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
