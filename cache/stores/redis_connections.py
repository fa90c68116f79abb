"""Commands to Redis on redis-py's connections, without the overhead of its client and its pool.

That takes three times as long as a lookup itself (docs/decisions/009-what-a-miss-costs.md). The pool checks a
connection before each use; here a connection that is found closed is replaced.
"""

from typing import Any

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

Command = tuple[str | bytes | int, ...]


class RedisConnections:
    """Persistent connections; as many as there were concurrent callers at most."""

    def __init__(self, pool: "redis.asyncio.ConnectionPool") -> None:
        self._pool = pool  # makes the connections
        self._idle: list[AbstractConnection] = []

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
        connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        return await self._ask_on(connection, commands)

    async def _ask_on(self, connection: AbstractConnection, commands: tuple[Command, ...]) -> list[Any]:
        try:
            await _send(connection, commands)
            replies = [await _reply(connection) for _ in commands]
        except BaseException:
            # Replies may still come, and must not be taken for those to the next commands.
            await connection.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        return replies

    async def close(self) -> None:
        """Close the idle connections."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect(nowait=True)


async def _send(connection: AbstractConnection, commands: tuple[Command, ...]) -> None:
    try:
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    except RuntimeError as error:  # raised by uvloop for a closed transport
        raise RedisConnectionError("the connection is closed") from error


async def _reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as refusal:
        return refusal
