"""A small HTTP client for what wrk cannot do: looking at single answers, and reading streams."""

import asyncio
import time
from dataclasses import dataclass

from benchmarks.harness.processes import CannotMeasure, Server, authorization
from benchmarks.harness.request_bodies import CHAT_PATH

_LARGEST_CHUNK = 2**24


@dataclass(frozen=True, slots=True)
class Answer:
    """`headers` by lower-case name; times are monotonic seconds of sending the request and having the last byte."""

    status: int
    headers: dict[str, str]
    body: bytes
    sent: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.sent


class Client:
    """One kept-alive connection, made at the first request."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> "Client":
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._server.port, limit=_LARGEST_CHUNK)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    async def post(self, body: bytes, path: str = CHAT_PATH, method: str = "POST") -> Answer:
        """Raises CannotMeasure when the connection breaks."""
        if self._reader is None or self._writer is None:
            raise RuntimeError("use it as an asynchronous context manager")
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"{authorization(self._server)}Content-Length: {len(body)}\r\n\r\n"
        )
        sent = time.monotonic()
        self._writer.write(head.encode() + body)
        try:
            status, headers = _read_head(await self._reader.readuntil(b"\r\n\r\n"))
            content = await _read_body(self._reader, headers)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise CannotMeasure("The server broke the connection within an answer.") from error
        return Answer(status, headers, content, sent, time.monotonic())


async def post(server: Server, body: bytes, path: str = CHAT_PATH) -> Answer:
    """One request on a connection of its own. Raises CannotMeasure unless it succeeds."""
    async with Client(server) as client:
        answer = await client.post(body, path)
    if answer.status != 200:
        raise CannotMeasure(f"The server answered with status {answer.status}: {answer.body[:500]!r}")
    return answer


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    chunks: list[bytes] = []
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        chunk = await reader.readexactly(size + 2)
        if not size:
            return b"".join(chunks)
        chunks.append(chunk[:-2])
