"""Upstreams that bill prompts as Anthropic and OpenAI do: what they read from their prompt caches, and write there.

`AnthropicCache` and `OpenAICache` are the rules alone, with a clock of one's own; `BillingUpstream` serves them. Four
characters are a token here.
"""

import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import xxhash
from aiohttp import web

Json = dict[str, Any]

MIN_TOKENS = 1024
TTL = 300.0
CHARACTERS = 4

_encode = msgspec.json.Encoder(order="deterministic").encode


class Bill(NamedTuple):
    """Tokens of a prompt by price."""

    plain: int
    written: int = 0
    read: int = 0

    def price(self, written: float, read: float) -> float:
        """In tokens of the plain price."""
        return self.plain + written * self.written + read * self.read


class Refused(Exception):
    """The request is invalid; the message says why."""


class AnthropicCache:
    """Caching by breakpoints: at most 4, a minimum length, a look back of 20 blocks, 5 minutes after each use."""

    MAX_BREAKPOINTS = 4
    LOOK_BACK = 20
    WRITTEN, READ = 1.25, 0.1

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._expires: dict[bytes, float] = {}

    def bill(self, owner: str, fields: Json) -> Bill:
        """The bill of a body of Messages. Raises Refused for breakpoints where there can be none, or too many."""
        blocks = list(_blocks(fields))
        breakpoints = [index for index, (_, is_marked) in enumerate(blocks) if is_marked]
        if len(breakpoints) > self.MAX_BREAKPOINTS:
            raise Refused(f"A maximum of 4 blocks with cache_control may be provided. Found {len(breakpoints)}.")
        digest, sums, digests = xxhash.xxh3_128(f"{owner} {fields['model']}".encode()), [0], [b""]
        for text, _ in blocks:
            digest.update(text)
            sums.append(sums[-1] + -(-len(text) // CHARACTERS))
            digests.append(digest.digest())
        now = self._clock()
        reached = [
            end
            for point in breakpoints
            for end in range(point + 1, max(0, point + 1 - self.LOOK_BACK), -1)
            if self._expires.get(digests[end], now) > now
        ]
        read_to = max(reached, default=0)
        written_to = max((end for end in (p + 1 for p in breakpoints) if sums[end] >= MIN_TOKENS), default=0)
        for end in {read_to, *(p + 1 for p in breakpoints)} - {0}:
            if sums[end] >= MIN_TOKENS:
                self._expires[digests[end]] = now + TTL
        written = max(0, sums[written_to] - sums[read_to])
        return Bill(sums[-1] - sums[read_to] - written, written, sums[read_to])


def _blocks(fields: Json) -> Iterator[tuple[bytes, bool]]:
    """Each block of the prompt as text, without its breakpoint, and whether it has one."""
    for tool in fields.get("tools") or ():
        yield _block(b"tool", tool)
    for block in _listed(fields.get("system")):
        yield _block(b"system", block)
    for message in fields["messages"]:
        for block in _listed(message["content"]):
            yield _block(message["role"].encode(), block)


def _listed(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def _block(said_by: bytes, block: Json) -> tuple[bytes, bool]:
    is_marked = "cache_control" in block
    if is_marked and block.get("type") in ("thinking", "redacted_thinking"):
        raise Refused("cache_control cannot be set for thinking blocks")
    if is_marked and block.get("type") == "text" and not block["text"].strip():
        raise Refused("cache_control cannot be set for empty text blocks")
    rest = {name: value for name, value in block.items() if name != "cache_control"}
    text = rest["text"].encode() if rest.keys() == {"type", "text"} else _encode(rest)
    return said_by + b"\n" + text, is_marked


class OpenAICache:
    """Automatic prompt caching: from 1,024 tokens in steps of 128, on the machine that the prompt's beginning and
    `prompt_cache_key` lead to. A machine takes 15 requests a minute of one kind; others go to a further one.
    """

    STEP = 128
    ROUTED_BY = 256
    PER_MINUTE = 15
    WRITTEN, READ = 1.0, 0.1

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._expires: dict[tuple[bytes, bytes], float] = {}
        self._recent: defaultdict[bytes, deque[float]] = defaultdict(deque)

    def bill(self, owner: str, fields: Json) -> Bill:
        """The bill of a body of chat completions."""
        parts = [*(fields.get("tools") or ()), *fields["messages"]]
        prompt = b"".join(_encode(part) for part in parts)
        tokens = -(-len(prompt) // CHARACTERS)
        now = self._clock()
        begins = prompt[: self.ROUTED_BY * CHARACTERS] + fields.get("prompt_cache_key", "").encode()
        machine = self._machine(xxhash.xxh3_128_digest(owner.encode() + begins), now)
        digest, read, reads = xxhash.xxh3_128(), 0, True
        for end in range(self.STEP, tokens + 1, self.STEP):
            digest.update(prompt[(end - self.STEP) * CHARACTERS : end * CHARACTERS])
            if end >= MIN_TOKENS:
                place = (machine, digest.digest())
                reads = reads and self._expires.get(place, now) > now
                read = end if reads else read
                self._expires[place] = now + TTL
        return Bill(tokens - read, 0, read)

    def _machine(self, kind: bytes, now: float) -> bytes:
        recent = self._recent[kind]
        while recent and now - recent[0] > 60:
            recent.popleft()
        recent.append(now)
        return b"%s %d" % (kind, (len(recent) - 1) // self.PER_MINUTE)


class BillingUpstream:
    """Serves Messages and chat completions, each with its cache. `bodies` are the requests as they arrived."""

    def __init__(self, refuses: str = "") -> None:
        """A request that has `refuses` in its body is answered with 400."""
        self._refuses = refuses
        self.messages = AnthropicCache()
        self.chats = OpenAICache()
        self.bodies: list[bytes] = []
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["BillingUpstream"]:
        """Listen on a free port of the loopback; `url` tells which."""
        application = web.Application(client_max_size=2**30)
        application.router.add_post("/v1/messages", self._message)
        application.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            yield self
        finally:
            await runner.cleanup()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.url.removeprefix("http://").removesuffix("/v1")

    async def _received(self, request: web.Request) -> Json:
        body = await request.read()
        fields: Json = msgspec.json.decode(body)
        if "messages" not in fields:  # the router asks whether the endpoint is there
            raise Refused("messages: Field required")
        self.bodies.append(body)
        if self._refuses and self._refuses in body.decode():
            raise Refused(f"Unknown field: {self._refuses}")
        return fields

    async def _message(self, request: web.Request) -> web.Response:
        try:
            fields = await self._received(request)
            bill = self.messages.bill("", fields)
        except Refused as reason:
            error = {"type": "invalid_request_error", "message": str(reason)}
            return web.json_response({"type": "error", "error": error}, status=400)
        usage = {
            "input_tokens": bill.plain,
            "cache_creation_input_tokens": bill.written,
            "cache_read_input_tokens": bill.read,
            "output_tokens": 2,
        }
        answer = {"id": "msg_1", "type": "message", "role": "assistant", "model": fields["model"], "usage": usage}
        said = [{"type": "text", "text": "As billed."}]
        return web.json_response({**answer, "content": said, "stop_reason": "end_turn", "stop_sequence": None})

    async def _chat(self, request: web.Request) -> web.Response:
        try:
            fields = await self._received(request)
        except Refused as reason:
            return web.json_response({"error": {"message": str(reason), "type": "invalid_request_error"}}, status=400)
        bill = self.chats.bill("", fields)
        prompt = sum(bill)
        usage = {"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2}
        choice = {"index": 0, "message": {"role": "assistant", "content": "As billed."}, "finish_reason": "stop"}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": fields["model"], "choices": [choice]}
        return web.json_response({**answer, "usage": {**usage, "prompt_tokens_details": {"cached_tokens": bill.read}}})
