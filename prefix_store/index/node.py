"""The Redis that has a namespace: a single server, the master that sentinels name, or a node of a cluster.

A namespace is in one slot, so one node of a cluster has all of it, and no client for clusters is needed: another node
replies with the slot's node (MOVED), which is then used.
"""

import asyncio
import contextlib
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.connection import Connection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, NoScriptError, RedisError

from prefix_store.index.scripts import Script
from prefix_store.index.servers import Address, Servers, servers_of

Word = bytes | str | int
_MAX_REDIRECTS = 4
_CONNECT_SECONDS = 2.0
_SENTINEL_SECONDS = 0.5


class RedisNode:
    """Calls the node that has the namespace. Has no deadline of its own."""

    def __init__(self, url: str) -> None:
        """`url` is that of `open_index`. Raises ValueError."""
        self._servers: Servers = servers_of(url)
        self._options: dict[str, Any] = dict(parse_url(self._servers.url))
        self._seeds: tuple[Address | None, ...] = self._servers.nodes or (self._address_of_seed(),)
        self._others: list[Address | None] = []
        # A sentinel is no place for commands: the master is asked for before the first one.
        self._knows_master = not self._servers.sentinels
        self._address = self._seeds[0]
        self._client = self._connected_to(self._address)

    async def run(self, script: Script, keys: tuple[bytes, ...], *args: Word) -> Any:
        """The script's reply; loads it if Redis lacks it. Raises RedisError, OSError."""
        try:
            return await self._command("EVALSHA", script.sha, len(keys), *keys, *args)
        except NoScriptError:  # restarted, flushed, or another node
            return await self._command("EVAL", script.source, len(keys), *keys, *args)

    async def learn_nodes(self) -> None:
        """Lists the cluster's nodes, in case this one fails. Raises OSError, RedisError."""
        try:
            slots: list[list[Any]] = await self._ask("CLUSTER", "SLOTS")
        except redis.exceptions.ResponseError:  # not a cluster, or this user may not call it
            self._others = []
            return
        # Each is [first slot, last slot, [host, port, …] of the primary, of its replicas …].
        nodes = [node for _, _, *nodes in slots for node in nodes]
        self._others = [(_text(host), int(port)) for host, port, *_ in nodes if host]

    async def disconnect(self) -> None:
        """Drops the connections to a node that failed; uses the next node, or the present master of sentinels."""
        if self._servers.sentinels:
            self._knows_master = False
            return
        known = list(dict.fromkeys((*self._seeds, *self._others)))
        place = known.index(self._address) if self._address in known else -1
        await self._switch_node(known[(place + 1) % len(known)])

    async def close(self) -> None:
        # Closing a connection may still raise an error of its peer.
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()

    async def _command(self, *words: Word) -> Any:
        """The reply of the node that has the namespace."""
        for _ in range(_MAX_REDIRECTS):
            try:
                return await self._ask(*words)
            except MovedError as moved:
                # No host: the same host, on another port.
                host = moved.host or (self._address[0] if self._address else "127.0.0.1")
                await self._switch_node((host, int(moved.port)))
        raise RedisError("the cluster's nodes send each other's clients round in a circle")

    async def _ask(self, *words: Word) -> Any:
        if not self._knows_master:
            await self._switch_node(await self._named_master())
            self._knows_master = True
        try:
            return await self._client.execute_command(*words)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # raised by uvloop for a closed transport
            raise RedisConnectionError("the connection is closed") from error

    async def _named_master(self) -> Address:
        """The master by the first sentinel that answers. Raises RedisError, OSError."""
        credentials = {"username": self._servers.sentinel_username, "password": self._servers.sentinel_password}
        failure: Exception | None = None
        for sentinel in self._servers.sentinels:
            client = self._connected_to(sentinel, db=0, **credentials)
            try:
                async with asyncio.timeout(_SENTINEL_SECONDS):
                    reply = await client.execute_command(  # type: ignore[no-untyped-call]
                        "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._servers.master
                    )
                if reply:
                    return _text(reply[0]), int(reply[1])
            except (RedisError, OSError, TimeoutError) as error:
                failure = error
            finally:
                with contextlib.suppress(RedisError, OSError):
                    await client.aclose()
        raise RedisConnectionError(f"no sentinel names the master {self._servers.master!r}") from failure

    async def _switch_node(self, address: Address | None) -> None:
        before, self._client = self._client, self._connected_to(address)
        self._address = address
        with contextlib.suppress(RedisError, OSError):
            await before.connection_pool.disconnect(inuse_connections=False)

    def _connected_to(self, address: Address | None, **others: Any) -> "redis.asyncio.Redis":
        options = {**self._options, **others}
        kind = options.pop("connection_class", Connection)
        if address is not None:
            options["host"], options["port"] = address
            if kind is UnixDomainSocketConnection:
                kind = Connection
                options.pop("path", None)
        pool = redis.asyncio.ConnectionPool(
            connection_class=kind,
            socket_connect_timeout=_CONNECT_SECONDS,
            # The client's own timeout uses asyncio.wait_for, which in Python 3.11 can swallow a cancellation; callers
            # have a deadline.
            socket_timeout=None,
            # Once more on a new connection: an old one that was closed does not mean that the server is down.
            retry=Retry(NoBackoff(), 1),
            # Saves reading the library's metadata for each connection, and RESP2 needs no HELLO.
            driver_info=None,
            protocol=2,
            **options,
        )
        return redis.asyncio.Redis(connection_pool=pool)

    def _address_of_seed(self) -> Address | None:
        if urlsplit(self._servers.url).scheme == "unix":
            return None
        return self._options.get("host", "localhost"), self._options.get("port", 6379)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
