"""A proxy between two engines, which passes on an engine's answers or something else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import ClientSession, ClientTimeout, web
from multidict import CIMultiDict

_OF_THE_CONNECTION = {"content-length", "transfer-encoding", "connection", "date", "server"}


@dataclass
class PeerResponse:
    """What the engine answered to another engine's request."""

    status: int
    headers: CIMultiDict[str]
    body: bytes

    def response(self, body: bytes | None = None) -> web.Response:
        """It, or with other bytes."""
        return web.Response(status=self.status, headers=self.headers, body=self.body if body is None else body)


Alter = Callable[[web.Request, PeerResponse], Awaitable[web.StreamResponse]]


async def unchanged(request: web.Request, original: PeerResponse) -> web.StreamResponse:
    return original.response()


@dataclass
class AlteringProxy:
    """Its address is given out as an engine's own; `alter` decides what becomes of each answer."""

    url: str = ""
    engine: str = ""
    """Where the engine really is."""
    alter: Alter = unchanged
    responses: list[PeerResponse] = field(default_factory=list)
    """All that the engine answered."""

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Asks the engine, and answers what `alter` makes of it."""
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in {"host", "content-length"}
        }
        async with (
            ClientSession(timeout=ClientTimeout(total=30)) as client,
            client.request(
                request.method, self.engine + request.path_qs, headers=headers, data=await request.read()
            ) as response,
        ):
            kept = CIMultiDict(
                (name, value) for name, value in response.headers.items() if name.lower() not in _OF_THE_CONNECTION
            )
            original = PeerResponse(response.status, kept, await response.read())
        self.responses.append(original)
        return await self.alter(request, original)


@asynccontextmanager
async def standing_between() -> AsyncIterator[AlteringProxy]:
    """Listens on a free port."""
    proxy = AlteringProxy()
    application = web.Application(client_max_size=2**26)
    application.router.add_route("*", "/{path:.*}", proxy.pass_on)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield proxy
    finally:
        await runner.cleanup()


async def trickled(request: web.Request, original: PeerResponse, body: AsyncIterator[bytes]) -> web.StreamResponse:
    """Sends the head of an answer, then pieces as they come, until the asking engine disconnects."""
    response = web.StreamResponse(status=original.status, headers=original.headers)
    await response.prepare(request)
    try:
        async for piece in body:
            await response.write(piece)
        await response.write_eof()
    except (ConnectionError, asyncio.CancelledError):
        pass
    return response
