"""Requests that ask Ollama to load or unload a model. An upstream has its models loaded; they are answered at once."""

from typing import Any

from gateway.surfaces.surface import Json
from gateway.surfaces.timestamps import rfc3339

# What is empty in a request that only loads.
_ASKED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "/api/chat": ("messages", (None, [])),
    "/api/generate": ("prompt", (None, "")),
    "/api/embed": ("input", (None, "", [])),
    "/api/embeddings": ("prompt", (None, "")),
}


def is_load(path: str, fields: Json) -> bool:
    """Whether a request asks for nothing but its model: no messages, no prompt, no input."""
    name, empty = _ASKED[path]
    return fields.get(name) in empty


def load_answer(path: str, fields: Json, now: float) -> Json:
    """The answer to it, which is one object for clients that stream too. `now` is Unix time in seconds."""
    if path == "/api/embeddings":
        return {"embedding": []}
    if path == "/api/embed":
        return {"model": fields["model"], "embeddings": []}
    said: Json = {"message": {"role": "assistant", "content": ""}} if path == "/api/chat" else {"response": ""}
    reason = "unload" if _is_zero(fields.get("keep_alive")) else "load"
    return {"model": fields["model"], "created_at": rfc3339(now), **said, "done": True, "done_reason": reason}


def _is_zero(duration: Any) -> bool:
    """Whether a number of seconds, or a text such as "0s", is no time at all."""
    if isinstance(duration, str):
        return "0" in duration and not any(digit in duration for digit in "123456789")
    return duration == 0 and not isinstance(duration, bool)
