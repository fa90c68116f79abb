"""A server with OpenAI's embeddings API that computes with a real encoder, and fails when it is told to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from cache.semantic.embedding.encoder import Encoder


class EmbeddingsApi:
    """What came in, and what the next requests get."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.status = 200
        self.body: bytes | None = None
        """Sent instead of embeddings."""
        self.goes_on = asyncio.Event()
        """No request is answered while it is not set."""
        self.goes_on.set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def asked(self) -> list[str]:
        """All texts, in order."""
        return [text for request in self.requests for text in request["input"]]

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.paths.append(request.path)
        await self.goes_on.wait()
        if self.status != 200 or self.body is not None:
            return web.Response(status=self.status, body=self.body, content_type="application/json")
        # Longer than a unit, and in another order: neither is for the server to promise.
        vectors = 3 * await asyncio.to_thread(self.encoder.encode, body["input"])
        data = [
            {"object": "embedding", "index": index, "embedding": vector.tolist()}
            for index, vector in reversed(list(enumerate(vectors)))
        ]
        return web.json_response({"object": "list", "model": body["model"], "data": data})


@asynccontextmanager
async def embedding_server(encoder: Encoder, port: int = 0) -> AsyncIterator[EmbeddingsApi]:
    server = EmbeddingsApi(encoder)
    app = web.Application()
    app.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()
