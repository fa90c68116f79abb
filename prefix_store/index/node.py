"""The Redis that has a namespace: a single server, or the node of a cluster that serves the namespace's slot.

A namespace is in one slot, so one node has all of it, and no client for clusters is needed: another node replies with
the slot's node (MOVED), which is then used.
"""

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

Word = bytes | str | int
Address = tuple[str, int]

_MAX_REDIRECTS = 4
_CONNECT_SECONDS = 2.0


class RedisNode:
    """Calls the node that has the namespace. Has no deadline of its own."""

    def __init__(self, url: str) -> None:
        """`url` is redis://, rediss:// or unix://, of a single server or of any node of a cluster."""
        self._options: dict[str, Any] = dict(parse_url(url))
        self._seed = None if urlsplit(url).scheme == "unix" else self._address_of_seed()
        self._others: list[Address | None] = []
        self._address = self._seed
        self._client = self._connected_to(self._seed)

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
        """Drops the connections to a node that failed; uses the next node, if there is one."""
        known = list(dict.fromkeys((self._seed, *self._others)))
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
        try:
            return await self._client.execute_command(*words)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # raised by uvloop for a closed transport
            raise RedisConnectionError("the connection is closed") from error

    async def _switch_node(self, address: Address | None) -> None:
        before, self._client = self._client, self._connected_to(address)
        self._address = address
        with contextlib.suppress(RedisError, OSError):
            await before.connection_pool.disconnect(inuse_connections=False)

    def _connected_to(self, address: Address | None) -> "redis.asyncio.Redis":
        options = dict(self._options)
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

    def _address_of_seed(self) -> Address:
        return self._options.get("host", "localhost"), self._options.get("port", 6379)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
