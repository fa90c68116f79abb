"""An engine that counts a word as a token: it says which tokens a prompt has, holds prompts, and publishes events."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import xxhash
import zmq
import zmq.asyncio
from aiohttp import web

from gateway.routing.prefixes.event_sources import configured_source

BLOCK_TOKENS = 2
_pack = msgspec.msgpack.Encoder().encode


def tokens_of(prompt: str) -> list[int]:
    return [xxhash.xxh32_intdigest(word.encode()) for word in prompt.split()]


class Engine:
    """A server at `url`; `stored` are the prompts that it holds, `completed` what it answered, and `fields` what it
    was asked last. `hang` delays every answer while it is set, `delay` by so many seconds; while it `is_closed` it
    answers 404. `sources` are the publishers that it lists, as vLLM does.
    """

    def __init__(self, has_index: bool) -> None:
        self._has_index = has_index
        self.stored: list[list[int]] = []
        self.asked = 0
        self.fields: dict[str, Any] = {}
        self.hang = False
        self.delay = 0.0
        self.is_closed = False
        self.completed: list[str] = []
        self.owned_by = "keepgate"
        self.sources: dict[str, dict[str, Any]] = {}
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Engine"]:
        application = web.Application(client_max_size=2**23)
        application.router.add_post("/tokenize", self._tokenize)
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_get("/v1/models", self._list_models)
        application.router.add_get("/kv_event_sources", self._list_sources)
        if self._has_index:
            application.router.add_post("/v1/prefix/lookup", self._look_up)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            yield self
        finally:
            await runner.cleanup()

    async def _tokens(self, request: web.Request) -> list[int]:
        self.asked += 1
        if self.is_closed:
            raise web.HTTPNotFound
        self.fields = await request.json()
        if self.hang:
            await asyncio.Event().wait()
        await asyncio.sleep(self.delay)
        return tokens_of(self.fields["prompt"])

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": await self._tokens(request)})

    async def _complete(self, request: web.Request) -> web.Response:
        self.completed.append((await request.json())["prompt"])
        choice = {"index": 0, "text": "yes", "finish_reason": "stop", "logprobs": None}
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "mock"}
        return web.json_response({**head, "choices": [choice]})

    async def _list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "mock", "owned_by": self.owned_by}]})

    async def _list_sources(self, request: web.Request) -> web.Response:
        return web.json_response(self.sources)

    async def _look_up(self, request: web.Request) -> web.Response:
        tokens = await self._tokens(request)
        held = max((_leading(stored, tokens) for stored in self.stored), default=0)
        return web.json_response({"tokens": len(tokens), "leading_tokens": {"device": 0, "memory": held}})


def _leading(stored: list[int], tokens: list[int]) -> int:
    count = next((at for at, (one, other) in enumerate(zip(stored, tokens, strict=False)) if one != other), None)
    leading = min(len(stored), len(tokens)) if count is None else count
    return leading - leading % BLOCK_TOKENS


class Publisher:
    """Publishes KV cache events as an engine does, at `address` if one is given; `as_maps` as newer versions of vLLM.
    `log` is for the replay, unless there is a recorded one in `replayed`.
    """

    def __init__(self, context: zmq.asyncio.Context, as_maps: bool = False, address: str | None = None) -> None:
        self._as_maps = as_maps
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replay = context.socket(zmq.ROUTER)
        self.log: list[tuple[int, bytes]] = []
        self.replayed: list[list[bytes]] = []
        self.number = 0
        self.address = address or ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Publisher"]:
        if self.address:
            self._socket.bind(self.address)
            self._replay.bind(configured_source(self.address).replay or "")
        else:
            self._bind()
        replaying = asyncio.create_task(self._answer_replays())
        try:
            yield self
        finally:
            replaying.cancel()
            await asyncio.wait([replaying])
            self._socket.close(linger=0)
            self._replay.close(linger=0)

    def _bind(self) -> None:
        """On a free port whose next one is free as well."""
        while True:
            port = self._socket.bind_to_random_port("tcp://127.0.0.1")
            try:
                self._replay.bind(f"tcp://127.0.0.1:{port + 1}")
            except zmq.ZMQError:
                self._socket.unbind(f"tcp://127.0.0.1:{port}")
            else:
                self.address = f"tcp://127.0.0.1:{port}"
                return

    async def wait_for_subscriber(self) -> None:
        async with asyncio.timeout(5):
            while not (await self._socket.recv()).startswith(b"\x01"):
                pass

    async def publish(self, *events: dict[str, Any], is_lost: bool = False, is_logged: bool = True) -> None:
        """Send a batch; one that `is_lost` takes a number and does not arrive."""
        values = events if self._as_maps else [list(event.values()) for event in events]
        batch = _pack({"ts": 1.0, "events": values} if self._as_maps else [1.0, values, None])
        if is_logged:
            self.log.append((self.number, batch))
        if not is_lost:
            await self.send([b"kv-events", self.number.to_bytes(8, "big"), batch])
        self.number += 1

    async def send(self, frames: list[bytes]) -> None:
        await self._socket.send_multipart(frames)

    async def _answer_replays(self) -> None:
        while True:
            client, _, first = await self._replay.recv_multipart()
            for frames in [each for each in self.replayed if each[-2] >= first]:  # its end has the highest number
                await self._replay.send_multipart([client, *frames])
            if self.replayed:
                continue
            for number, batch in self.log:
                if number >= int.from_bytes(first, "big"):
                    await self._replay.send_multipart([client, b"", number.to_bytes(8, "big"), batch])
            await self._replay.send_multipart([client, b"", (-1).to_bytes(8, "big", signed=True), b""])


def stored(tokens: list[int], **fields: Any) -> dict[str, Any]:
    """The event that an engine holds these tokens, from the beginning on."""
    whole = len(tokens) // BLOCK_TOKENS
    return {
        "type": "BlockStored",
        "block_hashes": [engine_hash(tokens[: (number + 1) * BLOCK_TOKENS]) for number in range(whole)],
        "parent_block_hash": None,
        "token_ids": tokens[: whole * BLOCK_TOKENS],
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        **fields,
    }


def removed(*prefixes: list[int]) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [engine_hash(prefix) for prefix in prefixes]}


def engine_hash(prefix: list[int]) -> bytes:
    """An engine's own number of a block."""
    return xxhash.xxh3_128_digest(repr(prefix).encode())
