"""An upstream that sends exactly the given bytes, for what no proper server would send."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Conversation = Callable[["Connection"], Awaitable[None]]

# Its end is the end of the connection; the other one has an explicit end, so that a cut is visible.
EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED_EVENT_STREAM = EVENT_STREAM[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"


class Connection:
    """One connection from the gateway. `head` and `body` are its request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
        self.head = head
        self.body = body
        self._reader = reader
        self._writer = writer

    @property
    def request_line(self) -> str:
        return self.head.split(b"\r\n", 1)[0].decode()

    async def send(self, data: bytes) -> None:
        """Write, and wait until the other side has taken most of it."""
        self._writer.write(data)
        await self._writer.drain()

    async def send_apart(self, *chunks: bytes) -> None:
        """Write each piece separately, so that the gateway reads them separately."""
        for chunk in chunks:
            await self.send(chunk)
            # The gateway runs on this loop, and reads during these turns.
            for _ in range(5):
                await asyncio.sleep(0)

    def cut(self) -> None:
        """Break the connection with a reset."""
        self._writer.transport.abort()

    async def closed(self, deadline: float = 10.0) -> None:
        """Return once the gateway has closed the connection. Raises TimeoutError."""
        async with asyncio.timeout(deadline):
            try:
                while await self._reader.read(65_536):
                    pass
            except ConnectionError:
                return


class RawUpstream:
    """Serves every POST with `conversation`; `connections` are those that got that far."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.connections: list[Connection] = []
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["RawUpstream"]:
        async with asyncio.TaskGroup() as tasks:
            serving: set[asyncio.Task[None]] = set()

            def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = tasks.create_task(self._serve(reader, writer))
                serving.add(task)
                task.add_done_callback(serving.discard)

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            try:
                self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
                yield self
            finally:
                server.close()
                for task in serving:
                    task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((h[15:] for h in head.split(b"\r\n") if h.lower().startswith(b"content-length:")), b"0")
            body = await reader.readexactly(int(length))
            if head.startswith(b"GET /v1/models "):
                listed = b'{"object":"list","data":[{"id":"mock","object":"model"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(listed), listed))
            elif body == b"{}":  # it has no other surface
                writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            else:
                connection = Connection(reader, writer, head, body)
                self.connections.append(connection)
                await self.conversation(connection)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the gateway has left
        finally:
            writer.close()


def chunked(data: bytes) -> bytes:
    """A chunk of a chunked body; an empty one ends it."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def json_reply(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """A whole HTTP response with a JSON body."""
    head = [b"HTTP/1.1 " + status, b"Content-Type: application/json", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join((*head, b"Connection: close", b"", body))


def saying(*chunks: bytes) -> Conversation:
    """Send these pieces, each written separately, and close."""

    async def converse(connection: Connection) -> None:
        await connection.send_apart(*chunks)

    return converse
