"""The reference: the least that aiohttp and uvloop can do and still read a request and answer it.

python -m benchmarks.harness.bare_server PORT --answer FILE [--content-type TYPE]
python -m benchmarks.harness.bare_server PORT --relay URL
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answering(body: bytes, content_type: str) -> Handler:
    """Read the body, return these bytes."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type=content_type)

    return answer


def relaying(url: str, session: aiohttp.ClientSession) -> Handler:
    """Send the body on, hand back what comes as it comes; nothing is looked at and nothing is kept."""

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with session.post(url + request.path, data=body) as reply:
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.headers["Content-Type"]})
            await response.prepare(request)
            async for piece in reply.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    return relay


async def _serve(port: int, handler: Handler) -> None:
    application = web.Application()
    application.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    await asyncio.Event().wait()


async def _main(arguments: argparse.Namespace) -> None:
    if arguments.answer is not None:
        body = arguments.answer.read_bytes()  # nothing is being served yet
        await _serve(arguments.port, answering(body, arguments.content_type))
        return
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**18
    ) as session:
        await _serve(arguments.port, relaying(arguments.relay, session))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.bare_server")
    parser.add_argument("port", type=int)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--answer", type=Path)
    what.add_argument("--relay")
    parser.add_argument("--content-type", default="application/json")
    uvloop.run(_main(parser.parse_args()))
