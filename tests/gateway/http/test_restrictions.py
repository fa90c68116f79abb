"""What a server refuses before any handler: hosts, origins, and connections over its limit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from gateway.http.hosts import HostCheck
from gateway.http.server import HttpServer
from gateway.settings.settings import Settings
from tests.gateway.client import DEADLINE, Answer
from tests.gateway.wire import Wire

HANDLED: list[str] = []


@asynccontextmanager
async def serving(hosts: HostCheck | None = None, max_connections: int | None = None) -> AsyncIterator[int]:
    """A server that answers everything; its port."""
    HANDLED.clear()

    async def answer(request: web.Request) -> web.Response:
        HANDLED.append(request.method)
        return web.Response(text="handled")

    application = web.Application()
    application.add_routes([web.route("*", "/{rest:.*}", answer)])
    inner = web.AppRunner(application)
    await inner.setup()
    assert inner.server is not None
    server = HttpServer(10.0, access_log=None)
    server.use(inner.server, lambda handler: handler)
    server.restrict(hosts, max_connections)
    runner = web.ServerRunner(server)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
        await inner.cleanup()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


async def ask(connection: Wire, host: str = "localhost", *headers: str, method: str = "POST") -> Answer:
    lines = (f"{method} /v1/cache HTTP/1.1", f"Host: {host}", "Content-Length: 0", *headers, "", "")
    await connection.send("\r\n".join(lines).encode())
    return await connection.answer()


async def test_another_host_and_another_origin_reach_no_handler() -> None:
    """They get 421 and 403 in OpenAI's form, and the connection ends."""
    async with serving(HostCheck(Settings())) as port:
        async with connected(port) as connection:
            assert (await ask(connection)).status == 200
            refused = await ask(connection, "evil.example")
            assert (refused.status, refused.error["code"]) == (421, "wrong_host")
            assert await connection.reader.read() == b""
        async with connected(port) as connection:
            refused = await ask(connection, "localhost", "Origin: https://evil.example", "Content-Type: text/plain")
            assert (refused.status, refused.error["code"]) == (403, "foreign_origin")
        async with connected(port) as connection:
            preflight = ("Origin: https://evil.example", "Access-Control-Request-Method: DELETE")
            assert (await ask(connection, "localhost", *preflight, method="OPTIONS")).status == 403
    assert HANDLED == ["POST"]


async def test_a_connection_over_the_limit_is_told_so() -> None:
    """With 429 and Retry-After, and a place that becomes free is used."""
    async with serving(max_connections=2) as port:
        async with connected(port) as first, connected(port) as second:
            assert [(await ask(connection)).status for connection in (first, second)] == [200, 200]
            async with connected(port) as third:
                refused = await ask(third)
                assert (refused.status, refused.error["code"]) == (429, "too_busy")
                assert refused.headers["Retry-After"] == "1"
                assert await third.reader.read() == b""
            assert (await ask(first)).status == 200
        await _until_answered(port)


async def test_many_connections_over_the_limit_are_cut() -> None:
    """They do not pile up without a request."""
    async with serving(max_connections=1) as port, asyncio.timeout(DEADLINE):
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(80)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in pairs]
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        assert done
        for task, (_, writer) in zip(ended, pairs, strict=True):
            task.cancel()
            writer.transport.abort()


async def _until_answered(port: int) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            async with connected(port) as connection:
                if (await ask(connection)).status == 200:
                    return


@pytest.mark.parametrize("limit", [None, 100])
async def test_without_restrictions_all_is_answered(limit: Any) -> None:
    """Any host, any origin."""
    async with serving(max_connections=limit) as port, connected(port) as connection:
        assert (await ask(connection, "evil.example", "Origin: https://evil.example")).status == 200
