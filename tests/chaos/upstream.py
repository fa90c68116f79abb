"""An OpenAI-compatible server that fails as it is told: `python -m tests.chaos.upstream PORT`.

It prints its port (with PORT 0 a free one), then reads from its standard input what to do with POST requests from now
on: a line with one of BEHAVIOURS each time, answered by the same line on its standard output.
"""

import asyncio
import contextlib
import json
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

from tests.chaos.answers import MODELS, tenant_digest, vector_of, words_of

BEHAVIOURS = (
    "well",
    "refuse",
    "reset",
    "hang before the first byte",
    "hang after the first byte",
    "answer 429",
    "answer 429 without Retry-After",
    "answer 500",
    "answer 503",
    "answer bytes that are no HTTP",
    "answer 200 with broken JSON",
    "answer 200 with a web page",
    "answer 200 with a stream of noise",
    "cut the stream",
)
_NAMESPACE = "x-keepgate-namespace"
# Idle connections are closed after this time, as servers do while their clients are about to use them again.
_IDLE_SECONDS = 2.0
_CHUNK_SECONDS = 0.005
_NOISE = b"\x00\xfe{]\n\n<<<>>>\r\n\r\n" * 20
_STATUSES = {
    "answer 429": (b"429 Too Many Requests", b"Retry-After: 1\r\n"),
    "answer 429 without Retry-After": (b"429 Too Many Requests", b""),
    "answer 500": (b"500 Internal Server Error", b""),
    "answer 503": (b"503 Service Unavailable", b"Retry-After: 1\r\n"),
}


class ChaosUpstream:
    """The server; `behaviour` is one of BEHAVIOURS."""

    def __init__(self, port: int) -> None:
        self.behaviour = "well"
        self.port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=512)
        self.port = self._server.sockets[0].getsockname()[1]

    async def behave(self, behaviour: str) -> None:
        """Do so with further requests; one that refuses also ends all connections."""
        self.behaviour = behaviour
        if behaviour == "refuse" and self._server is not None:
            self._server.close()
            self._server = None
            for writer in list(self._writers):
                _reset(writer)
        elif behaviour != "refuse" and self._server is None:
            await self.listen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                async with asyncio.timeout(_IDLE_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                method, path, headers = _parse(head)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if not await self._answer(writer, method, path, headers, body):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass  # the client has left, or has been idle
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> bool:
        """Whether the connection can be used again."""
        if method == "GET":
            listed = {"object": "list", "data": [{"id": model, "object": "model"} for model in MODELS]}
            return await _send_json(writer, b"200 OK", listed)
        if path not in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            return await _send_json(writer, b"404 Not Found", {"error": {"message": f"There is no {path}."}})
        fields = json.loads(body)
        if not fields:  # asked whether it has the endpoint
            return await _send_json(writer, b"400 Bad Request", {"error": {"message": "'model' is missing."}})
        behaviour = self.behaviour
        if behaviour == "reset":
            _reset(writer)
            return False
        if behaviour == "hang before the first byte":
            await asyncio.sleep(3600)
        if behaviour in _STATUSES:
            status, extra = _STATUSES[behaviour]
            return await _send_json(writer, status, {"error": {"message": "This is a fault."}}, extra)
        if behaviour == "answer bytes that are no HTTP":
            await _send(writer, _NOISE)
            return False
        if behaviour == "answer 200 with broken JSON":
            return await _send_bytes(writer, b"200 OK", b"application/json", b'{"id": "x", "choices": [{"mess')
        if behaviour == "answer 200 with a web page":
            return await _send_bytes(writer, b"200 OK", b"text/html", b"<html><body>Please log in</body></html>")
        if behaviour == "answer 200 with a stream of noise":
            return await _send_bytes(writer, b"200 OK", b"text/event-stream", _NOISE)
        tenant = tenant_digest(headers.get(_NAMESPACE) or headers.get("authorization", ""))
        if path == "/v1/embeddings":
            answer = json.dumps(_embeddings(fields, tenant)).encode()
            return await self._send_in_parts(writer, b"application/json", [answer[:9], answer[9:]], behaviour)
        words = words_of(tenant, fields["model"], _prompt(fields))
        is_chat = path == "/v1/chat/completions"
        if fields.get("stream"):
            chunks = _stream(fields, words, is_chat)
            return await self._send_in_parts(writer, b"text/event-stream", chunks, behaviour)
        await asyncio.sleep(_CHUNK_SECONDS * len(words) / 2)
        answer = json.dumps(_whole(fields, words, is_chat)).encode()
        return await self._send_in_parts(writer, b"application/json", [answer[:40], answer[40:]], behaviour)

    async def _send_in_parts(
        self, writer: asyncio.StreamWriter, content_type: bytes, parts: list[bytes], behaviour: str
    ) -> bool:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n" % content_type
        for number, part in enumerate(parts):
            await _send(writer, head + b"%x\r\n%s\r\n" % (len(part), part))
            head = b""
            if number == 0 and behaviour == "hang after the first byte":
                await asyncio.sleep(3600)
            if number == len(parts) // 3 and behaviour == "cut the stream":
                _reset(writer)
                return False
            if len(parts) > 2:
                await asyncio.sleep(_CHUNK_SECONDS)
        await _send(writer, b"0\r\n\r\n")
        return True


def _parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    line, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = line.split(" ")
    pairs = (text.partition(":") for text in lines if text)
    return method, target.partition("?")[0], {name.lower(): value.strip() for name, _, value in pairs}


def _prompt(fields: Mapping[str, Any]) -> str:
    given = fields["messages"][-1]["content"] if "messages" in fields else fields["prompt"]
    return given if isinstance(given, str) else "".join(part["text"] for part in given)


def _whole(fields: Mapping[str, Any], words: list[str], is_chat: bool) -> dict[str, Any]:
    text = "".join(words)
    content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    usage = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
    return {
        "id": "chaos-1",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 1,
        "model": fields["model"],
        "choices": [{"index": 0, **content, "finish_reason": "stop"}],
        "usage": usage,
    }


def _stream(fields: Mapping[str, Any], words: list[str], is_chat: bool) -> list[bytes]:
    head = {
        "id": "chaos-1",
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": 1,
        "model": fields["model"],
    }
    chunks: list[dict[str, Any]] = []
    for number, word in enumerate(words):
        content: dict[str, Any] = {"delta": {"content": word}} if is_chat else {"text": word}
        if is_chat and number == 0:
            content["delta"]["role"] = "assistant"
        chunks.append({**head, "choices": [{"index": 0, **content, "finish_reason": None}]})
    end: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
    chunks.append({**head, "choices": [{"index": 0, **end, "finish_reason": "stop"}]})
    if (fields.get("stream_options") or {}).get("include_usage"):
        usage = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
        chunks.append({**head, "choices": [], "usage": usage})
    return [*(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]


def _embeddings(fields: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    texts = [fields["input"]] if isinstance(fields["input"], str) else fields["input"]
    data = [
        {"object": "embedding", "index": number, "embedding": vector_of(tenant, fields["model"], text)}
        for number, text in enumerate(texts)
    ]
    return {"object": "list", "data": data, "model": fields["model"], "usage": {"prompt_tokens": 3, "total_tokens": 3}}


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _send_bytes(
    writer: asyncio.StreamWriter, status: bytes, content_type: bytes, body: bytes, extra: bytes = b""
) -> bool:
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n" % (status, content_type, len(body))
    await _send(writer, head + extra + b"\r\n" + body)
    return True


async def _send_json(writer: asyncio.StreamWriter, status: bytes, body: Any, extra: bytes = b"") -> bool:
    return await _send_bytes(writer, status, b"application/json", json.dumps(body).encode(), extra)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection with a reset, whatever is still to be sent."""
    opened: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is closed already
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _main() -> None:
    upstream = ChaosUpstream(int(sys.argv[1]))
    await upstream.listen()
    print(upstream.port, flush=True)
    while behaviour := await asyncio.to_thread(sys.stdin.readline):
        await upstream.behave(behaviour.strip())
        print(behaviour.strip(), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
