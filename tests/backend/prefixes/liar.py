"""Somebody between two engines, who passes on what the one says to the other, or something else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import ClientSession, ClientTimeout, web
from multidict import CIMultiDict

_OF_THE_CONNECTION = {"content-length", "transfer-encoding", "connection", "date", "server"}


@dataclass
class Honest:
    """What the engine answered to a request of another."""

    status: int
    headers: CIMultiDict[str]
    body: bytes

    def response(self, body: bytes | None = None) -> web.Response:
        """It, or with other bytes."""
        return web.Response(status=self.status, headers=self.headers, body=self.body if body is None else body)


Tell = Callable[[web.Request, Honest], Awaitable[web.StreamResponse]]


async def the_truth(request: web.Request, honest: Honest) -> web.StreamResponse:
    return honest.response()


@dataclass
class Liar:
    """Its address is given out as an engine's own; `tell` says what it makes of each answer."""

    url: str = ""
    engine: str = ""
    """Where the engine really is."""
    tell: Tell = the_truth
    responses: list[Honest] = field(default_factory=list)
    """All that the engine answered."""

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Asks the engine and tells what it likes."""
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
            honest = Honest(response.status, kept, await response.read())
        self.responses.append(honest)
        return await self.tell(request, honest)


@asynccontextmanager
async def standing_between() -> AsyncIterator[Liar]:
    """Listens on a free port."""
    liar = Liar()
    application = web.Application(client_max_size=2**26)
    application.router.add_route("*", "/{path:.*}", liar.pass_on)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        liar.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield liar
    finally:
        await runner.cleanup()


async def trickled(request: web.Request, honest: Honest, body: AsyncIterator[bytes]) -> web.StreamResponse:
    """The head of an answer, then pieces as they come, until whoever asked has had enough."""
    response = web.StreamResponse(status=honest.status, headers=honest.headers)
    await response.prepare(request)
    try:
        async for piece in body:
            await response.write(piece)
        await response.write_eof()
    except (ConnectionError, asyncio.CancelledError):
        pass
    return response
