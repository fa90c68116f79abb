"""Requests as chat apps send them."""

import json
from typing import Any

CHAT_PATH = "/v1/chat/completions"

_QUESTION = "Explain in two sentences why the sky is blue at noon and red in the evening."
_SYSTEM = "You are a helpful assistant. Answer briefly, and say so when you do not know."
# Keys and placeholder of `distinct`: as wide as the numbers that replace it, so that every body has one length.
NUMBER_DIGITS = 12


def chat(question: str = _QUESTION, *, stream: bool = False) -> bytes:
    """About 300 bytes: what an SDK sends for one question."""
    return _encoded({"messages": _messages(question), "stream": stream})


def chat_with_tools(question: str = _QUESTION) -> bytes:
    """About 26 KB: what a chat UI sends with dozens of tools."""
    return _encoded(
        {"messages": _messages(question), "tools": [_tool(number) for number in range(37)], "stream": False}
    )


def in_other_forms(question: str = _QUESTION, *, stream: bool = False) -> dict[str, bytes]:
    """The same chat as a client of each form of API sends it, by its endpoint."""
    common = {"model": "bench", "temperature": 0.7, "stream": stream}
    user = _messages(question)[1:]
    forms: dict[str, dict[str, Any]] = {
        CHAT_PATH: {**common, "messages": _messages(question), "max_tokens": 512},
        "/v1/messages": {**common, "system": _SYSTEM, "messages": user, "max_tokens": 512},
        "/v1/responses": {**common, "instructions": _SYSTEM, "input": question, "max_output_tokens": 512},
        "/api/chat": {
            "model": "bench",
            "stream": stream,
            "messages": _messages(question),
            "options": {"temperature": 0.7, "num_predict": 512},
        },
    }
    return {path: json.dumps(fields).encode() for path, fields in forms.items()}


def distinct_parts(*, stream: bool = False) -> tuple[bytes, bytes]:
    """What comes before and after a number of NUMBER_DIGITS digits that makes a chat unlike every other."""
    marker = "#" * NUMBER_DIGITS
    before, _, after = chat(f"{marker} {_QUESTION}", stream=stream).partition(marker.encode())
    return before, after


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]


def _encoded(fields: dict[str, Any]) -> bytes:
    return json.dumps({"model": "bench", "temperature": 0.7, **fields}).encode()


def _tool(number: int) -> dict[str, Any]:
    name = f"tool_{number}"
    fields = {
        field: {
            "type": "string",
            "description": f"The {field} that {name} is to use; leave it out where it is not known.",
        }
        for field in ("query", "language", "region", "format")
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up number {number} of the things that an assistant may want to look up.",
            "parameters": {"type": "object", "properties": fields, "required": ["query"]},
        },
    }
