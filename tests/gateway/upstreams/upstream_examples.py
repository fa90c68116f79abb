"""Answers of upstreams for tests, and the address of one that does not listen."""

import socket

import msgspec

ANSWER = msgspec.json.encode(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    }
)
EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Gr\xc3\xbc"}}]}\n\n',
    b": keep-alive\n\n",
    b'event: delta\nid: 7\nretry: 10\ndata: {"choices":[{"index":0,"delta":{"content":"\xc3\x9fe"}}]}\n\n',
    b'data:{"choices":[{"index":0,\ndata: "delta":{"content":"!"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]


def nothing_listens() -> str:
    """The URL of a port that refuses connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1"
