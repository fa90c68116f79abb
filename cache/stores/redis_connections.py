"""Commands to one Redis server on redis-py's connections, without the overhead of its client and its pool.

That takes three times as long as a lookup itself (docs/decisions/009-what-a-miss-costs.md). The pool checks a
connection before each use; here a connection that is found closed is replaced.
"""

from collections.abc import Callable
from typing import Any

import redis.asyncio
from hiredis import pack_command
from redis.asyncio.connection import AbstractConnection, Connection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from cache.stores.redis_url import Address

Command = tuple[str | bytes | int | float, ...]

CONNECT_SECONDS = 2.0


class RedisConnections:
    """Persistent connections to one server; as many as there were concurrent callers at most."""

    def __init__(self, connect: Callable[[], AbstractConnection]) -> None:
        self._connect = connect
        self._idle: list[AbstractConnection] = []
        self._times_closed = 0

    async def ask(self, *commands: Command) -> list[Any]:
        """Redis' replies to repeatable commands, sent together; a refused one gives a ResponseError.

        Raises RedisError and OSError when there is no connection.
        """
        if self._idle:
            try:
                return await self._ask_on(self._idle.pop(), commands)
            except RedisConnectionError:
                # The server has closed it, and probably the other idle ones; it may be available now.
                await self.close()
        return await self._ask_on(self._connect(), commands)

    async def _ask_on(self, connection: AbstractConnection, commands: tuple[Command, ...]) -> list[Any]:
        times_closed = self._times_closed
        try:
            await _send(connection, commands)
            replies = [await _reply(connection) for _ in commands]
        except BaseException:
            # Replies may still come, and must not be taken for those to the next commands.
            await connection.disconnect(nowait=True)
            raise
        if times_closed == self._times_closed:
            self._idle.append(connection)
        else:
            await connection.disconnect(nowait=True)
        return replies

    async def close(self) -> None:
        """Close the idle connections; those in use are closed after their replies."""
        self._times_closed += 1
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect(nowait=True)


class Connector:
    """Makes connections as a URL of a single server says: credentials, database, TLS and options."""

    def __init__(self, server_url: str) -> None:
        options: dict[str, Any] = dict(parse_url(server_url))
        kind = options.pop("connection_class", Connection)
        options |= {
            "socket_connect_timeout": CONNECT_SECONDS,
            # With a timeout of its own a connection uses asyncio.wait_for, which in Python 3.11 can swallow a
            # cancellation: deadlines would pass unnoticed. Every call has a deadline here.
            "socket_timeout": None,
            # Once more: a closed connection does not mean that the server is down.
            "retry": Retry(NoBackoff(), 1),
            # Sending the client library's name means reading its metadata for every new connection, which blocks the
            # event loop for longer than some deadlines; managed services refuse it; and RESP2 needs no HELLO.
            "driver_info": None,
            "protocol": 2,
        }
        # Only its method that makes connections is used: it knows what each kind of connection takes.
        self._pool = redis.asyncio.ConnectionPool(connection_class=kind, **options)
        self._takes_address = not issubclass(kind, UnixDomainSocketConnection)

    def __call__(self, address: Address | None = None, **options: Any) -> AbstractConnection:
        """A connection to the URL's own server, or to another one."""
        if address is None and not options:
            return self._pool.make_connection()  # type: ignore[no-any-return, no-untyped-call]
        place = {"host": address[0], "port": address[1]} if address is not None and self._takes_address else {}
        return self._pool.connection_class(**{**self._pool.connection_kwargs, **place, **options})


async def _send(connection: AbstractConnection, commands: tuple[Command, ...]) -> None:
    # redis-py's asyncio connections would pack in Python, a microsecond and more for each argument.
    packed = [pack_command(command) for command in commands]  # type: ignore[arg-type]  # its stub has one argument
    try:
        await connection.send_packed_command(packed, check_health=False)
    except RuntimeError as error:  # raised by uvloop for a closed transport
        raise RedisConnectionError("the connection is closed") from error


async def _reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as refusal:
        return refusal
