"""Messages as streams of events."""

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.surfaces.messages.answers import CHAT
from gateway.surfaces.messages.arguments import json_of
from gateway.surfaces.surface import Json

CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
"""The blocks whose input comes in pieces."""

# They are known when an answer begins; the other counts are sent again at its end.
_FIRST_USAGE = ("cache_creation", "inference_geo", "service_tier", "speed")
_LAST_FIELDS = ("stop_reason", "stop_sequence", "stop_details")
_PIECE_CHARACTERS = 512
_encode = msgspec.json.Encoder().encode


def event(kind: str, **fields: Any) -> bytes:
    """One event, framed."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def stream_of(message: Json) -> bytes:
    """A whole message as the body of a stream. Raises UnicodeEncodeError or RecursionError for what JSON cannot say."""
    return b"".join(_events(message))


def _events(message: Json) -> Iterator[bytes]:
    known = {name: value for name, value in message.items() if name != CHAT}
    first = {**known, "content": [], **{name: None for name in _LAST_FIELDS if name in message}}
    usage = message.get("usage") or {}
    if "output_tokens" in usage:
        first["usage"] = {**usage, "output_tokens": 0}
    yield event("message_start", message=first)
    for index, block in enumerate(message["content"]):
        yield from _block_events(index, block)
    yield ending(message)


def ending(message: Json) -> bytes:
    """The two events at the end of a message: what is known of it only then, and that it is over."""
    last = {name: message[name] for name in _LAST_FIELDS if name in message}
    patch = {CHAT: message[CHAT]} if CHAT in message else {}
    usage = message.get("usage") or {}
    counts = {name: count for name, count in usage.items() if name not in _FIRST_USAGE}
    return event("message_delta", delta=last, usage=counts, **patch) + event("message_stop")


def _block_events(index: int, block: Json) -> Iterator[bytes]:
    opened, deltas = _in_pieces(block)
    yield event("content_block_start", index=index, content_block=opened)
    for piece in deltas:
        yield event("content_block_delta", index=index, delta=piece)
    yield event("content_block_stop", index=index)


def _in_pieces(block: Json) -> tuple[Json, list[Json]]:
    """A block as it begins, and the deltas that complete it; none for one that is sent whole."""
    kind = block["type"]
    if kind == "text" and isinstance(block.get("text"), str):
        opened, deltas = {**block, "text": ""}, [text_delta(piece) for piece in _cut(block["text"])]
        citations = block.get("citations")
        if isinstance(citations, list) and citations:
            opened["citations"] = []
            deltas += [{"type": "citations_delta", "citation": citation} for citation in citations]
        return opened, deltas
    if kind == "thinking" and isinstance(block.get("thinking"), str):
        opened, deltas = {**block, "thinking": ""}, [thinking_delta(piece) for piece in _cut(block["thinking"])]
        if isinstance(block.get("signature"), str) and block["signature"]:
            opened["signature"] = ""
            deltas.append(signature_delta(block["signature"]))
        return opened, deltas
    if kind in CALLS and isinstance(block.get("input"), dict):
        text = json_of(block["input"]) if block["input"] else ""
        return {**block, "input": {}}, [input_delta(piece) for piece in _cut(text)]
    return block, []


def text_delta(text: str) -> Json:
    return {"type": "text_delta", "text": text}


def thinking_delta(thinking: str) -> Json:
    return {"type": "thinking_delta", "thinking": thinking}


def signature_delta(signature: str) -> Json:
    return {"type": "signature_delta", "signature": signature}


def input_delta(text: str) -> Json:
    return {"type": "input_json_delta", "partial_json": text}


def _cut(text: str) -> list[str]:
    """Pieces of a length that every reader of lines takes."""
    return [text[at : at + _PIECE_CHARACTERS] for at in range(0, len(text), _PIECE_CHARACTERS)]
