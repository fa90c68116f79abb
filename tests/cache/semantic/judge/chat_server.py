"""A server that speaks as much of OpenAI's chat completions as a judge needs, and says what it is told to say."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class ChatServer:
    """What came in, and how many requests were in progress at once."""

    def __init__(self, reply: Callable[[dict[str, Any]], str]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.cache_controls: list[str | None] = []
        self.status = 200
        self.body: bytes | None = None
        """Sent instead of a completion."""
        self.most_at_once = 0
        self.goes_on = asyncio.Event()
        """No request is answered while it is not set."""
        self.goes_on.set()
        self.arrived = asyncio.Semaphore(0)
        """Released by every request."""
        self.port = 0
        self._reply = reply
        self._now = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.paths.append(request.path)
        self.keys.append(request.headers.get("Authorization"))
        self.cache_controls.append(request.headers.get("Cache-Control"))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        self.arrived.release()
        try:
            await self.goes_on.wait()
        finally:
            self._now -= 1
        if self.body is not None:
            return web.Response(status=self.status, body=self.body, content_type="application/json")
        message = {"role": "assistant", "content": self._reply(body)}
        return web.json_response({"choices": [{"index": 0, "message": message}]}, status=self.status)


@asynccontextmanager
async def chat_server(reply: Callable[[dict[str, Any]], str] = lambda _: "SAME") -> AsyncIterator[ChatServer]:
    server = ChatServer(reply)
    app = web.Application()
    app.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()
