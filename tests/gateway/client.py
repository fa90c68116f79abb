"""A plain HTTP client of a gateway, without retries or hidden decoding."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDictProxy
from yarl import URL

from gateway.processes.app import Gateway
from tests.gateway.cache_status import Member, parse_cache_status
from tests.waiting import until

# Ample for a busy machine; a request that takes longer hangs.
DEADLINE = 20.0
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_decode = msgspec.json.Decoder().decode


def chat(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    """The body of a chat request, with further `fields`."""
    return {"model": "mock", "messages": [{"role": "user", "content": content}], **fields}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def json(self) -> Any:
        return _decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's form, which it must have exactly."""
        assert set(self.json) == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        return error

    @property
    def events(self) -> list[bytes]:
        """The data of each event of a stream, read strictly: `data: ` and one line each."""
        *events, rest = self.body.split(b"\n\n")
        assert rest == b"", "a stream ends with the blank line of its last event"
        assert all(event.startswith(b"data: ") and b"\n" not in event for event in events), events
        return [event[6:] for event in events]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The chunks of a whole stream, which ends in one [DONE]."""
        *events, last = self.events
        assert last == b"[DONE]"
        return [_decode(event) for event in events]

    @property
    def response(self) -> dict[str, Any]:
        """The response object, streamed or not."""
        if self.headers["Content-Type"].startswith("text/event-stream"):
            return assemble(self.chunks)
        response: dict[str, Any] = self.json
        return response

    @property
    def text(self) -> str:
        choice = self.response["choices"][0]
        text: str = choice["message"]["content"] if "message" in choice else choice["text"]
        return text

    @property
    def cache(self) -> str:
        return self.headers["x-keepgate-cache"]

    @property
    def entry(self) -> str:
        return self.headers["x-keepgate-entry"]

    @property
    def cache_status(self) -> Member:
        """Keepgate's member of Cache-Status: the last one, which is nearest to the client."""
        return parse_cache_status(", ".join(self.headers.getall("Cache-Status")))[-1]


@dataclass(slots=True)
class Stream:
    """A response that is being read."""

    response: aiohttp.ClientResponse
    _rest: bytes = field(default=b"")

    async def event(self) -> bytes:
        """The data of the next event; b"" at the end of the stream."""
        async with asyncio.timeout(DEADLINE):
            while b"\n\n" not in self._rest:
                piece = await self.response.content.readany()
                if not piece:
                    assert not self._rest, "the stream ended within an event"
                    return b""
                self._rest += piece
        event, _, self._rest = self._rest.partition(b"\n\n")
        return event.removeprefix(b"data: ")

    async def rest(self) -> list[bytes]:
        """The data of all later events."""
        events: list[bytes] = []
        while event := await self.event():
            events.append(event)
        return events

    def leave(self) -> None:
        """Break the connection, as a client that was closed does."""
        self.response.close()


class Client:
    """Calls one gateway, with `headers` on every request."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self.gateway = gateway
        self.headers = dict(headers)
        self._session = session

    def tenant(self, key: str) -> "Client":
        """The same gateway, called with another API key."""
        return Client(self.gateway, self._session, {**self.headers, "Authorization": f"Bearer {key}"})

    async def send(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request and read the whole response. `body` is bytes, or encoded as JSON."""
        async with asyncio.timeout(DEADLINE), self._open(method, path, body, headers) as response:
            return Answer(response.status, response.headers, await response.read())

    async def post(self, body: Any, path: str = CHAT, **headers: str) -> Answer:
        """Sends a request; `headers` with underscores for hyphens."""
        return await self.send("POST", path, body, {name.replace("_", "-"): v for name, v in headers.items()})

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.send("GET", path, None, {name.replace("_", "-"): v for name, v in headers.items()})

    @asynccontextmanager
    async def stream(self, body: Any, path: str = CHAT, **headers: str) -> AsyncIterator[Stream]:
        """Sends a request and reads the answer by events; leaving the block breaks the connection."""
        named = {name.replace("_", "-"): v for name, v in headers.items()}
        async with asyncio.timeout(DEADLINE):
            response = await self._open("POST", path, body, named)
        try:
            yield Stream(response)
        finally:
            response.close()

    async def figure(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these `labels`. Counters are shared by the gateways of a process."""
        exposition = (await self.get("/metrics")).body.decode()
        total = 0.0
        for line in exposition.splitlines():
            series, _, value = line.rpartition(" ")
            wanted = all(f'{label}="{text}"' in series for label, text in labels.items())
            if series.partition("{")[0] == f"keepgate_{name}" and wanted:
                total += float(value)
        return total

    async def until(self, name: str, value: float, **labels: str) -> None:
        """Return once the figure has this value. Raises TimeoutError."""

        async def has_value() -> bool:
            return await self.figure(name, **labels) == value

        await until(has_value, DEADLINE)

    def _open(
        self, method: str, path: str, body: Any, headers: Mapping[str, str] | None
    ) -> "aiohttp.client._RequestContextManager":
        data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        typed = {"Content-Type": "application/json"} if data is not None else {}
        return self._session.request(
            method,
            URL(self.gateway.url + path, encoded=True),
            data=data,
            allow_redirects=False,
            headers={**typed, **self.headers, **(headers or {})},
        )


def assemble(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The response object of a stream, as a client library builds it; uses only OpenAI's reference."""
    response: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for name, value in chunk.items():
            if name == "choices":
                for choice in value:
                    _add_choice(choices.setdefault(choice["index"], {"index": choice["index"]}), choice)
            elif name != "usage" or value is not None:
                response[name] = value
    response["object"] = response["object"].removesuffix(".chunk")
    response["choices"] = [choices[index] for index in sorted(choices)]
    return response


def _add_choice(known: dict[str, Any], news: dict[str, Any]) -> None:
    for name, value in news.items():
        if name == "delta":
            message = known.setdefault("message", {})
            for part, piece in value.items():
                if part == "tool_calls":
                    _add_tool_calls(message.setdefault("tool_calls", []), piece)
                elif isinstance(piece, str) and part != "role":
                    message[part] = (message.get(part) or "") + piece
                elif piece is not None or part not in message:
                    message[part] = piece
        elif name == "text":
            known["text"] = known.get("text", "") + value
        elif name == "logprobs" and isinstance(value, dict):
            logprobs = known["logprobs"] = known.get("logprobs") or {}
            for part, tokens in value.items():
                known_tokens = logprobs.get(part)
                logprobs[part] = (known_tokens or []) + tokens if isinstance(tokens, list) else tokens
        elif value is not None or name not in known:
            known[name] = value


def _add_tool_calls(known: list[dict[str, Any]], news: list[dict[str, Any]]) -> None:
    for call in news:
        index = call["index"]
        while len(known) <= index:
            known.append({"function": {"name": "", "arguments": ""}})
        for name, value in call.items():
            if name == "function":
                for part, piece in value.items():
                    known[index]["function"][part] = known[index]["function"].get(part, "") + piece
            elif name != "index":
                known[index][name] = value
