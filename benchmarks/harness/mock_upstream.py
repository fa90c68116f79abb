"""A fast OpenAI-compatible upstream that costs the machine little, so that what stands before it can be measured.

Every chat is answered with the same words after a fixed service time; a chat that says `"stream": true` gets them as
events of about 250 bytes, all at once or one per `--pause` seconds.

    python -m benchmarks.harness.mock_upstream --port N [--service-time S] [--chunks N] [--pause S]
"""

import argparse
import asyncio
import json
import re
import selectors
import time

_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb'"stream":\s*true')
_MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","created":1700000000,"owned_by":"bench"}]}'
_CHAT = b"POST /v1/chat/completions"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
_CHUNK_BYTES = 250
_ANSWER_WORDS = 60


def answer() -> bytes:
    """A chat completion of about 700 bytes."""
    text = " ".join(f"word{number}" for number in range(_ANSWER_WORDS))
    return json.dumps(
        {
            "id": "chatcmpl-bench",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": "bench",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 60, "completion_tokens": _ANSWER_WORDS, "total_tokens": 60 + _ANSWER_WORDS},
        }
    ).encode()


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "bench",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def stream_events(chunks: int) -> list[bytes]:
    """`chunks` events of about _CHUNK_BYTES bytes, the last one with a finish reason, and [DONE]."""
    filling = "word " * max(1, (_CHUNK_BYTES - len(_event({"content": ""}))) // 5)
    return [*(_event({"content": filling}) for _ in range(chunks - 1)), _event({}, "stop"), b"data: [DONE]\n\n"]


class Plan:
    """What this upstream says, and when; shared by its connections."""

    def __init__(self, service_time: float, chunks: int, pause: float) -> None:
        self.service_time = service_time
        self.pause = pause
        self.whole = _head("application/json", len(answer())) + answer()
        self.models = _head("application/json", len(_MODELS)) + _MODELS
        events = stream_events(chunks)
        self.events = [b"%x\r\n%b\r\n" % (len(event), event) for event in events] + [b"0\r\n\r\n"]
        self.stream_head = _head("text/event-stream", None)


def _head(content_type: str, length: int | None) -> bytes:
    body = f"Content-Length: {length}" if length is not None else "Transfer-Encoding: chunked"
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{body}\r\n\r\n".encode()


class Connection(asyncio.Protocol):
    """One kept-alive connection without pipelining. HTTP is read only as far as these clients need it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if not blank:
            return
        length = _LENGTH.search(head)
        if length is not None and len(body) < int(length[1]):
            return
        self._received = b""
        loop = asyncio.get_running_loop()
        if head.startswith(b"GET"):
            self._write(self._plan.models)
        elif not head.startswith(_CHAT):
            self._write(_NOT_FOUND)  # it has no other form of API
        elif _STREAM.search(body):
            loop.call_later(self._plan.service_time, self._begin_stream)
        elif self._plan.service_time:
            loop.call_later(self._plan.service_time, self._write, self._plan.whole)
        else:
            self._write(self._plan.whole)

    def _begin_stream(self) -> None:
        if self._plan.pause:
            self._write(self._plan.stream_head)
            self._next_event(0, time.monotonic())
        else:
            self._write(self._plan.stream_head + b"".join(self._plan.events))

    def _next_event(self, number: int, began: float) -> None:
        self._write(self._plan.events[number])
        if number + 1 < len(self._plan.events) and self._transport is not None:
            # By the clock of the stream, so that lateness does not add up.
            due = began + (number + 1) * self._plan.pause
            asyncio.get_running_loop().call_at(due, self._next_event, number + 1, began)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def _serve(port: int, plan: Plan) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(plan), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def _exact_loop() -> asyncio.AbstractEventLoop:
    # select(2) waits in microseconds. The timers of epoll and libuv tick in milliseconds, and a service time that
    # waits for the next tick would hide the very delays that are to be measured.
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.mock_upstream")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--service-time", type=float, default=0.0, help="seconds before an answer begins")
    parser.add_argument("--chunks", type=int, default=64, help="events of a stream")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two events; 0: all at once")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=_exact_loop) as runner:
        runner.run(_serve(options.port, Plan(options.service_time, options.chunks, options.pause)))
