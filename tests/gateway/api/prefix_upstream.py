"""An upstream with a prefix store: it reports the reused tokens of a prompt in a header and in usage, and its blocks
under /v1/prefix. A word counts as a token.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

REUSES = ("conversation", "one-shot")
_TELL_TENANTS = ("Authorization", "x-api-key", "api-key", "x-keepgate-namespace")
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it arrived; `target` is its path on the wire."""

    method: str
    target: str
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def tenant(self) -> tuple[str, ...]:
        """The headers by which the in-repo backend separates tenants."""
        return tuple(f"{name}:{value}" for name in _TELL_TENANTS for value in self.headers.getall(name, ()))

    @property
    def reuses(self) -> list[str]:
        return self.headers.getall("x-keepgate-reuse", [])


_RECEIVED = web.RequestKey("received", Received)


@dataclass(slots=True)
class PrefixUpstream:
    """Stores each tenant's prompts. A cleared `hold` delays answers, a cleared `hang` operations on the store.

    `refusal` is the store's reply to everything, as status and body.
    """

    models: tuple[str, ...] = ("mock",)
    owned_by: str = "keepgate"
    refusal: tuple[int, bytes] | None = None
    received: list[Received] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    hang: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    _prompts: set[tuple[tuple[str, ...], str]] = field(default_factory=set)
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.hold.set()
        self.hang.set()

    @property
    def asked(self) -> list[Received]:
        """The requests for an answer."""
        return [received for received in self.received if received.target.endswith("completions")]

    @property
    def store_asked(self) -> list[Received]:
        """The requests to the prefix store."""
        return [received for received in self.received if "/prefix" in received.target]

    async def wait_for(self, count: int) -> None:
        """Until `count` requests for an answer have arrived. Raises TimeoutError."""
        async with asyncio.timeout(10), self._arrived:
            await self._arrived.wait_for(lambda: len(self.asked) >= count)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["PrefixUpstream"]:
        """Listen on a free port of the loopback, given in `url`."""
        application = web.Application(middlewares=[self._note])
        application.add_routes(
            [
                web.get("/v1/models", self._list_models),
                web.post("/v1/chat/completions", self._answer),
                web.post("/v1/completions", self._answer),
                web.get("/v1/prefix", self._describe),
                web.delete("/v1/prefix", self._empty),
                web.post("/v1/prefix/{operation:lookup|pin|unpin|blocks}", self._operate),
                web.post("/v1/embeddings", self._embed),
            ]
        )
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            yield self
        finally:
            await runner.cleanup()

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        received = Received(request.method, request.raw_path, request.headers, await request.read())
        request[_RECEIVED] = received
        if received.body == b"{}":  # whether it has another form of API
            raise web.HTTPNotFound
        async with self._arrived:
            self.received.append(received)
            self._arrived.notify_all()
        response: web.StreamResponse = await handler(request)
        return response

    async def _list_models(self, request: web.Request) -> web.Response:
        listed = [{"id": name, "object": "model", "owned_by": self.owned_by} for name in self.models]
        return _json({"object": "list", "data": listed})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        received = request[_RECEIVED]
        await self.hold.wait()
        if any(reuse not in REUSES for reuse in received.reuses) or len(received.reuses) > 1:
            return _json({"error": {"message": "x-keepgate-reuse", "type": "invalid_request_error"}}, status=400)
        fields = msgspec.json.decode(received.body)
        is_chat = "messages" in fields
        prompt = fields["messages"][-1]["content"] if is_chat else fields["prompt"]
        prompt_tokens = len(prompt.split())
        known = (received.tenant, prompt)
        prefix_tokens = prompt_tokens - 1 if known in self._prompts else 0
        self._prompts.add(known)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 1,
            "total_tokens": prompt_tokens + 1,
            "prompt_tokens_details": {"cached_tokens": prefix_tokens},
        }
        headers = {"x-keepgate-prefix-tokens": str(prefix_tokens)}
        common = {"id": f"a-{len(self.received)}", "created": 1_700_000_000, "model": fields["model"]}
        if not fields.get("stream"):
            said = {"message": {"role": "assistant", "content": "yes"}} if is_chat else {"text": "yes"}
            choice = {"index": 0, **said, "logprobs": None, "finish_reason": "stop"}
            kind = "chat.completion" if is_chat else "text_completion"
            return _json({**common, "object": kind, "choices": [choice], "usage": usage}, headers=headers)
        piece = {"delta": {"role": "assistant", "content": "yes"}} if is_chat else {"text": "yes"}
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        chunks: list[dict[str, Any]] = [
            {**common, "object": kind, "choices": [{"index": 0, **piece, "finish_reason": "stop"}]}
        ]
        if (fields.get("stream_options") or {}).get("include_usage"):
            chunks.append({**common, "object": kind, "choices": [], "usage": usage})
        events = b"".join(b"data: " + _encode(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
        return web.Response(body=events, content_type="text/event-stream", headers=headers)

    async def _embed(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": []})

    async def _describe(self, request: web.Request) -> web.Response:
        return await self._store_says({"namespace": "ab12", "tiers": {"memory": {"blocks": len(self._prompts)}}})

    async def _empty(self, request: web.Request) -> web.Response:
        removed = len(self._prompts)
        self._prompts.clear()
        return await self._store_says({"removed": removed})

    async def _operate(self, request: web.Request) -> web.Response:
        fields = msgspec.json.decode(request[_RECEIVED].body)
        return await self._store_says({"operation": request.match_info["operation"], "model": fields.get("model")})

    async def _store_says(self, answer: dict[str, Any]) -> web.Response:
        await self.hang.wait()
        if self.refusal is not None:
            status, body = self.refusal
            return web.Response(status=status, body=body, content_type="application/json")
        return _json(answer)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=_encode(value), content_type="application/json", headers=headers)
