"""An upstream that has other forms of API than chat completions, and answers with the bytes that it is given."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from multidict import CIMultiDictProxy

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
OLLAMA = "/api/chat"
JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"


@dataclass(frozen=True)
class Given:
    """An answer: its bytes as they are sent, and what it says of itself."""

    body: bytes
    content_type: str = JSON
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    """Whether the connection breaks after the body."""


@dataclass(frozen=True)
class Asked:
    """A request as it arrived."""

    path: str
    """With the query."""
    headers: CIMultiDictProxy[str]
    body: bytes


class NativeUpstream:
    """Answers a path with one of its `plain` answers, or of its `streams` where the body asks for a stream.

    While `hold` is cleared an answer has all of its body and no end. Without an answer for a path it does not have it.
    A probe, whose body is `{}`, is refused, and is not in `asked`.
    """

    def __init__(self, plain: Mapping[str, Given], streams: Mapping[str, Given]) -> None:
        self.plain = dict(plain)
        self.streams = dict(streams)
        self.asked: list[Asked] = []
        self.probed: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.url = ""

    @property
    def paths(self) -> list[str]:
        return [asked.path for asked in self.asked]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["NativeUpstream"]:
        """Listen on a free port of the loopback; `url` tells which."""
        application = web.Application(client_max_size=2**30)
        application.router.add_get("/v1/models", self._list_models)
        application.router.add_route("*", "/{path:.+}", self._answer)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            yield self
        finally:
            await runner.cleanup()

    async def _list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model", "created": 1}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        has_path = request.path in self.plain or request.path in self.streams
        if body == b"{}":
            self.probed.append(request.path)
            return web.json_response({"error": {"message": "What?"}}, status=400 if has_path else 404)
        self.asked.append(Asked(request.raw_path, request.headers, body))
        if not has_path:
            return web.json_response({"error": {"message": f"There is no {request.path}."}}, status=404)
        compact = body.replace(b" ", b"")
        is_stream = b'"stream":true' in compact or (request.path == OLLAMA and b'"stream":false' not in compact)
        given = (self.streams if is_stream else self.plain)[request.path]
        headers = {"Content-Type": given.content_type, **given.headers}
        response = web.StreamResponse(status=given.status, headers=headers)
        await response.prepare(request)
        await response.write(given.body)
        await self.hold.wait()
        if given.cut:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write_eof()
        return response
