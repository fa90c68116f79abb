"""A client that writes its own bytes, for requests that no HTTP library would send."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from multidict import CIMultiDict, CIMultiDictProxy

from tests.gateway.client import DEADLINE, Answer, Client


@dataclass(slots=True)
class Wire:
    """One connection to a gateway."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        async with asyncio.timeout(DEADLINE):
            await self.writer.drain()

    async def line(self) -> bytes:
        """The next line, without its break."""
        async with asyncio.timeout(DEADLINE):
            return (await self.reader.readline()).rstrip(b"\r\n")

    async def answer(self) -> Answer:
        """The next whole response; its trailers are with its headers."""
        async with asyncio.timeout(DEADLINE):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            pairs = [line.split(": ", 1) for line in head[1:] if line]
            headers = CIMultiDict((name, value) for name, value in pairs)
            if headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(await self.reader.readline(), 16):
                    body += (await self.reader.readexactly(size + 2))[:-2]
                while trailer := (await self.reader.readline()).decode("latin-1").strip():
                    headers.add(*trailer.split(": ", 1))
            elif "Content-Length" in headers:
                body = await self.reader.readexactly(int(headers["Content-Length"]))
            else:
                body = await self.reader.read()
        return Answer(int(head[0].split()[1]), CIMultiDictProxy(headers), body)


@asynccontextmanager
async def wire(client: Client, receive_buffer: int | None = None) -> AsyncIterator[Wire]:
    """A connection to the client's gateway; leaving breaks it. The kernel takes in about `receive_buffer` bytes."""
    url = urlsplit(client.gateway.url)
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (url.hostname, url.port))
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def request_bytes(body: bytes, *headers: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    """A POST as bytes, with its length."""
    head = [b"POST " + path + b" HTTP/1.1", b"Host: gateway", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join((*head, b"", body))
