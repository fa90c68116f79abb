"""A scripted OpenAI upstream: to try the gateway, and to test an app against it, without a model.

`keepgate serve --upstream mock:` answers each chat with its last user message. `mock:FILE.yaml` follows a script:

    replies:
      - when: weather            # part of the last user message; a reply without `when` is for all the rest
        message: {content: "It is sunny."}
        finish_reason: stop
      - status: 429
        error: {message: "Slow down.", type: rate_limit_error}

In tests, `MockUpstream` is the same server with replies set from code and its requests on record.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from aiohttp import web

from cache.entries.answer import stream_of
from gateway.http.sse import EventSplitter
from gateway.settings.fields import SettingsError
from gateway.settings.yaml_file import read_yaml

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict).decode

MODEL = "mock"
_OTHER_SURFACES = ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/model/info")


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One scripted reply. Without `message`, `text` or `body` the last user message comes back.

    `events` are sent as the data of a stream as they are; `delay` is waited before the first byte, `pause` before
    each event, in seconds; after `cut_after` events the connection breaks. A request with a field that it `refuses` is
    answered with 400.
    """

    when: str | None = None
    status: int = 200
    message: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = "stop"
    body: dict[str, Any] | None = None
    events: list[Any] | None = None
    error: dict[str, Any] | None = None
    headers: dict[str, str] = {}
    delay: float = 0.0
    pause: float = 0.0
    cut_after: int | None = None
    refuses: tuple[str, ...] = ()


class Received(msgspec.Struct, frozen=True):
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        return _decode(self.body)


class MockUpstream:
    """An OpenAI-compatible server that follows `replies`; `hold` keeps every answer back while it is cleared.

    Of other forms of API it has the endpoints in `paths`, such as /v1/messages; there, replies have a `body` or
    `events` of that form.
    """

    def __init__(
        self, replies: Sequence[Reply] = (), models: Sequence[str] = (MODEL,), paths: Sequence[str] = ()
    ) -> None:
        self.replies = list(replies)
        self.models = list(models)
        self._paths = frozenset(paths)
        self.received: list[Received] = []
        self.cancelled = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self._arrived = asyncio.Condition()
        self._answers = 0
        self.url = ""

    async def wait_for(self, count: int, deadline: float = 10.0) -> None:
        """Until `count` requests have arrived. Raises TimeoutError."""
        async with asyncio.timeout(deadline), self._arrived:
            await self._arrived.wait_for(lambda: len(self.received) >= count)

    async def wait_for_cancelled(self, count: int, deadline: float = 10.0) -> None:
        """Until `count` requests have been given up by their sender. Raises TimeoutError."""
        async with asyncio.timeout(deadline), self._arrived:
            await self._arrived.wait_for(lambda: self.cancelled >= count)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator["MockUpstream"]:
        """Listen on a port of the loopback, with 0 on a free one; `url` tells which."""
        application = web.Application(client_max_size=2**30)
        application.router.add_get("/v1/models", self._list_models)
        application.router.add_get("/v1/models/{model:.+}", self._show_model)
        application.router.add_post("/v1/prefix{rest:(/.*)?}", _not_found)
        application.router.add_post("/{path:.+}", self._answer)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            yield self
        finally:
            await runner.cleanup()

    async def _list_models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [_model(name) for name in self.models]})

    async def _show_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self.models:
            error = {
                "message": f"The model {name!r} does not exist.",
                "type": "invalid_request_error",
                "param": "model",
            }
            return _json({"error": {**error, "code": "model_not_found"}}, status=404)
        return _json(_model(name))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path not in self._paths and (path in _OTHER_SURFACES or not path.startswith("/v1/")):
            return await _not_found(request)
        received = Received(request.path, dict(request.headers), await request.read())
        async with self._arrived:
            self.received.append(received)
            self._arrived.notify_all()
        try:
            return await self._reply(request, received.fields)
        except asyncio.CancelledError:
            await self._note_cancelled()
            raise
        except ConnectionError:  # the same, noticed by writing
            await self._note_cancelled()
            return web.Response()
        except (TypeError, ValueError, AttributeError):  # fields of other types than OpenAI's; what is no JSON
            error = {"message": "The request cannot be read.", "type": "invalid_request_error"}
            return _json({"error": {**error, "param": None, "code": None}}, status=400)

    async def _note_cancelled(self) -> None:
        self.cancelled += 1
        # Shielded from a cancellation by running to the next await only: the lock is free on one loop.
        async with self._arrived:
            self._arrived.notify_all()

    async def _reply(self, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        asked = _last_user_message(fields)
        reply = next((reply for reply in self.replies if reply.when is None or reply.when in asked), Reply())
        if refused := [field for field in reply.refuses if field in fields]:
            error = {
                "message": f"Unrecognized request argument supplied: {refused[0]}",
                "type": "invalid_request_error",
            }
            return _json({"error": error}, status=400)
        await asyncio.sleep(reply.delay)
        if not fields.get("stream"):
            await self.hold.wait()
        if reply.error is not None:
            return _json({"error": reply.error}, status=reply.status, headers=reply.headers)
        self._answers += 1
        if request.path.endswith("/embeddings"):
            return _json(reply.body or _embeddings(fields), status=reply.status, headers=reply.headers)
        body = reply.body or _response(reply, asked, fields, self._answers)
        if fields.get("stream"):
            return await self._stream(request, reply, body, fields)
        return _json(body, status=reply.status, headers=reply.headers)

    async def _stream(
        self, request: web.Request, reply: Reply, body: dict[str, Any], fields: dict[str, Any]
    ) -> web.StreamResponse:
        include_usage = bool((fields.get("stream_options") or {}).get("include_usage"))
        if reply.events is not None:
            events = [b"data: " + (e.encode() if isinstance(e, str) else _encode(e)) + b"\n\n" for e in reply.events]
        else:
            events = EventSplitter().feed(stream_of(body, include_usage))
        response = web.StreamResponse(
            status=reply.status, headers={"Content-Type": "text/event-stream; charset=utf-8", **reply.headers}
        )
        await response.prepare(request)
        for number, event in enumerate(events):
            if number == reply.cut_after:
                assert request.transport is not None  # noqa: S101  # the response has begun
                request.transport.abort()
                return response
            await asyncio.sleep(reply.pause)
            if number:
                await self.hold.wait()
            await response.write(event)
        await response.write_eof()
        return response


async def _not_found(request: web.Request) -> web.Response:
    """What takes no prompt for an answer."""
    error = {"message": f"There is no {request.method} {request.path}.", "type": "invalid_request_error"}
    return _json({"error": {**error, "param": None, "code": "not_found"}}, status=404)


def load_script(file: Path) -> list[Reply]:
    """The replies of a script. Raises SettingsError, naming the file and the key."""
    content = read_yaml(file, "replies: []")
    try:
        return msgspec.convert(content, _Script).replies
    except msgspec.ValidationError as error:
        raise SettingsError(f"upstreams: mock:{file}: {error}") from error


class _Script(msgspec.Struct, forbid_unknown_fields=True):
    replies: list[Reply]


def _response(reply: Reply, asked: str, fields: dict[str, Any], number: int) -> dict[str, Any]:
    """Usage counts words, which is what stands in for tokens here."""
    is_chat = "messages" in fields
    given = reply.text if reply.text is not None else asked
    message = reply.message or {"content": given}
    choice: dict[str, Any] = (
        {"index": 0, "message": {"role": "assistant", **message}} if is_chat else {"index": 0, "text": given}
    )
    prompt, completion = (len(text.split()) for text in (asked, str(message.get("content") or "")))
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-mock-{number}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 1_700_000_000,
        "model": fields.get("model", MODEL),
        "choices": [{**choice, "logprobs": None, "finish_reason": reply.finish_reason}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }


def _embeddings(fields: dict[str, Any]) -> dict[str, Any]:
    """A vector of four numbers for each input, which follow from it; usage counts words."""
    given = fields.get("input")
    inputs: list[Any] = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    digests = [xxhash.xxh3_64_digest(_encode(item)) for item in inputs]
    data = [
        {"object": "embedding", "index": index, "embedding": [byte / 255 for byte in digest[:4]]}
        for index, digest in enumerate(digests)
    ]
    tokens = sum(len(item.split()) if isinstance(item, str) else len(item) for item in inputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": fields.get("model", MODEL), "usage": usage}


def _last_user_message(fields: dict[str, Any]) -> str:
    for message in reversed(fields.get("messages") or ()):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, list):
                return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
            return str(content)
    return str(fields.get("prompt", ""))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 1_700_000_000, "owned_by": "keepgate"}


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=_encode(value), content_type="application/json", headers=headers)
