"""Which server has a key: the interface of redis_store.py, and its forms for one server and for sentinels.

cluster.py has that of a cluster.
"""

import asyncio
import logging
import random
from typing import Any, Protocol

from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from cache.errors import StoreUnavailable
from cache.stores.redis_connections import CONNECT_SECONDS, Command, Connector, RedisConnections
from cache.stores.redis_url import Address, RedisUrl

log = logging.getLogger(__name__)

_SENTINEL_SECONDS = 0.5
_LOOK_EVERY = 1.0


class Topology(Protocol):
    """The servers behind a URL. No method has a deadline of its own but `check` and `refresh`, of some seconds."""

    purges_name: str
    """The stream of purges: in the same slot as the hash of generations."""

    async def ask(self, *commands: Command) -> list[Any]:
        """The replies to repeatable commands, in their order; each goes to the server that has its key.

        A refused command gives a ResponseError, one whose server is known to be down a RedisError. Commands to one
        server are executed in their order. Raises RedisError and OSError when there is no connection.
        """

    async def ask_replica(self, command: Command) -> Any:
        """The reply to a read that may be some seconds old; the master's where replicas are not to be read."""

    async def transact(self, *commands: Command) -> list[Any]:
        """The replies to commands about keys of one slot, executed together or not at all. Raises as `ask`."""

    async def masters(self) -> list[RedisConnections]:
        """The connections to every master. Raises RedisError if one of them is down."""

    async def check(self) -> None:
        """Looks for the servers, and returns when they answer. Raises RedisError, OSError, StoreUnavailable."""

    async def maintain(self) -> None:
        """Looks again after servers that are down or have moved; runs for as long as the store is open."""

    async def close(self) -> None:
        """Close the idle connections."""


class SingleServer(RedisConnections):
    """One server, whatever is behind its name."""

    purges_name = "keepgate:purges"

    async def ask_replica(self, command: Command) -> Any:
        (reply,) = await self.ask(command)
        return reply

    async def transact(self, *commands: Command) -> list[Any]:
        return results(await self.ask(("MULTI",), *commands, ("EXEC",)))

    async def masters(self) -> list[RedisConnections]:
        return [self]

    async def check(self) -> None:
        await ping(self)

    async def maintain(self) -> None:
        """Nothing has to be looked after between outages."""


class SentinelServers(SingleServer):
    """The master that sentinels name, and its replicas for reads that may be old.

    The master is looked for at the start and after each failure (`check`), never while a request waits.
    """

    def __init__(self, url: RedisUrl, connector: Connector) -> None:
        super().__init__(self._connect_to_master)
        self._url = url
        self._connector = connector
        self._sentinels = list(url.addresses)
        self._master: Address | None = None
        self._replicas: list[RedisConnections] = []
        self._has_lost_replica = False

    async def ask(self, *commands: Command) -> list[Any]:
        replies = await super().ask(*commands)
        if any(isinstance(reply, ReadOnlyError) for reply in replies):
            # A failover: this server is a replica now. As an outage it makes the breaker look for the master.
            await self._forget_master()
            raise RedisConnectionError("the master has become a replica")
        return replies

    async def ask_replica(self, command: Command) -> Any:
        if not self._replicas:
            return await super().ask_replica(command)
        replica = random.choice(self._replicas)  # noqa: S311  # spreads load
        try:
            (reply,) = await replica.ask(command)
        except (RedisError, OSError):
            self._lose(replica)
            return await super().ask_replica(command)
        except asyncio.CancelledError:  # perhaps by a deadline, which the next lookups should not wait for as well
            self._lose(replica)
            raise
        return await super().ask_replica(command) if isinstance(reply, ResponseError) else reply

    async def check(self) -> None:
        address = await self._named_master()
        if address != self._master:
            await super().close()
            self._master = address
        role = (await super().ask(("ROLE",)))[0]
        if isinstance(role, list) and role[0] != b"master":  # a user that may not ask gets an error: it is believed
            await self._forget_master()
            raise StoreUnavailable("redis: a failover is under way")
        await ping(self)
        if self._url.reads_replicas:
            await self._find_replicas()

    async def maintain(self) -> None:
        """A master that was replaced may go on for seconds before it hears of it, and what it is told then is lost."""
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    address = await self._named_master()
                    if self._has_lost_replica:
                        await self._find_replicas()
            except (RedisError, OSError, TimeoutError, StoreUnavailable):
                continue  # it is still the one that is known
            if self._master not in (None, address):
                await self._forget_master()

    async def close(self) -> None:
        await super().close()
        for replica in self._replicas:
            await replica.close()

    async def _named_master(self) -> Address:
        reply = await self._ask_sentinels("GET-MASTER-ADDR-BY-NAME")
        if not reply:
            raise StoreUnavailable(f"redis: the sentinels know no master {self._url.master!r}")
        return text_of(reply[0]), int(reply[1])

    async def _find_replicas(self) -> None:
        found: list[RedisConnections] = []
        for reply in await self._ask_sentinels("REPLICAS"):
            fields = dict(zip(reply[::2], reply[1::2], strict=False))
            flags = text_of(fields.get(b"flags", b"")).split(",")
            if {"s_down", "o_down", "disconnected"}.isdisjoint(flags) and fields.get(b"master-link-status") == b"ok":
                address = (text_of(fields[b"ip"]), int(fields[b"port"]))
                found.append(RedisConnections(lambda address=address: self._connector(address)))  # type: ignore[misc]
        answering = [each for each in found if await _answers(each)]
        before, self._replicas = self._replicas, answering
        self._has_lost_replica = len(answering) < len(found)
        for replica in before:
            await replica.close()

    async def _ask_sentinels(self, command: str) -> Any:
        """The first reply of a sentinel; that one is asked first the next time."""
        failure: Exception | None = None
        for address in list(self._sentinels):
            connection = self._sentinel(address)
            try:
                async with asyncio.timeout(_SENTINEL_SECONDS):
                    (reply,) = await connection.ask(("SENTINEL", command, self._url.master))
            except (RedisError, OSError, TimeoutError) as error:
                failure = error
                continue
            finally:
                await connection.close()
            if isinstance(reply, RedisError) or not reply:
                failure = reply or failure
                continue
            self._sentinels.remove(address)
            self._sentinels.insert(0, address)
            return reply
        if failure is not None:
            raise RedisConnectionError(f"no sentinel answers: {failure or type(failure).__name__}") from failure
        return []

    def _sentinel(self, address: Address) -> RedisConnections:
        own = {"username": self._url.sentinel_username, "password": self._url.sentinel_password}
        return RedisConnections(lambda: self._connector(address, db=0, **own))

    def _connect_to_master(self) -> Connection:
        if self._master is None:
            raise RedisConnectionError("the master is not known")
        return self._connector(self._master)  # type: ignore[return-value]

    async def _forget_master(self) -> None:
        self._master = None
        await super().close()

    def _lose(self, replica: RedisConnections) -> None:
        if replica in self._replicas:
            self._replicas.remove(replica)
        self._has_lost_replica = True


async def ping(server: RedisConnections) -> None:
    """Raises RedisError if a server answers with an error or not at all."""
    (reply,) = await server.ask(("PING",))
    if isinstance(reply, RedisError):
        raise reply


async def _answers(server: RedisConnections) -> bool:
    try:
        async with asyncio.timeout(_SENTINEL_SECONDS):
            await ping(server)
    except (RedisError, OSError, TimeoutError):
        return False
    return True


def results(replies: list[Any]) -> list[Any]:
    """What EXEC replied, of the replies to a whole transaction. Raises its error, or the first that came before."""
    for reply in replies:
        if isinstance(reply, RedisError):
            raise reply
    outcome: list[Any] = replies[-1]
    return outcome


def text_of(value: bytes) -> str:
    return value.decode()
