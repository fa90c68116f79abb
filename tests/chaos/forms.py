"""The forms of API in which a question is asked, and how each tells an answer or an error."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


class Malformed(Exception):
    """An answer that is not in its form; the message says what is wrong."""


@dataclass(slots=True)
class Said:
    """What a stream said: its text, whether it ended as its form does, and the error that it told."""

    text: str = ""
    is_whole: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """A form of API. `read_event` adds an event of a stream, parsed, to what it said."""

    path: str
    body: Callable[[str], Json]
    read_whole: Callable[[Json], Any]
    read_event: Callable[[Json, Said], None] | None
    error_of: Callable[[Json], tuple[str, str]]
    """(code, message) of an error's body."""
    lines: bool = False
    """Whether a stream is lines of JSON; else it is server-sent events."""

    @property
    def streams(self) -> bool:
        return self.read_event is not None

    def said(self, body: bytes) -> Said:
        """Read a stream. Raises Malformed."""
        assert self.read_event is not None
        said = Said()
        for event in _lines(body) if self.lines else _events(body):
            if said.is_whole or said.error:
                raise Malformed(f"something follows its end: {event!r}")
            if event is None:
                said.is_whole = True
            elif "error" in event and event["error"] is not None:
                said.error = str(event["error"])
            else:
                self.read_event(event, said)
        return said

    def refused(self, body: bytes) -> tuple[str, str]:
        """The code of an error ("" where the form has none) and its message. Raises Malformed."""
        try:
            code, message = self.error_of(json.loads(body))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Malformed(f"no error in this form: {body[:200]!r}") from error
        if not isinstance(message, str) or not message:
            raise Malformed(f"an error without a message: {body[:200]!r}")
        return str(code or ""), message


def _events(body: bytes) -> Iterator[Json | None]:
    """The data of each event; None for [DONE]."""
    for frame in body.split(b"\n\n"):
        lines = [line[5:].strip() for line in frame.split(b"\n") if line.startswith(b"data:")]
        if lines == [b"[DONE]"]:
            yield None
        elif lines:
            yield _parsed(b"\n".join(lines))
        elif frame.strip() and not frame.startswith(b":"):
            raise Malformed(f"no event: {frame[:200]!r}")


def _lines(body: bytes) -> Iterator[Json]:
    yield from map(_parsed, body.splitlines())


def _parsed(data: bytes) -> Json:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise Malformed(f"no JSON: {data[:200]!r}") from error
    if not isinstance(value, dict):
        raise Malformed(f"no object: {data[:200]!r}")
    return value


def _openai_error(body: Json) -> tuple[str, str]:
    return body["error"].get("code"), body["error"]["message"]


def _messages(prompt: str) -> list[Json]:
    return [{"role": "user", "content": prompt}]


def _read_chat(event: Json, said: Said) -> None:
    for choice in event["choices"]:
        said.text += choice["delta"].get("content") or ""


def _read_completion(event: Json, said: Said) -> None:
    for choice in event["choices"]:
        said.text += choice["text"]


def _read_messages(event: Json, said: Said) -> None:
    if event["type"] == "content_block_delta":
        said.text += event["delta"]["text"]
    said.is_whole = event["type"] == "message_stop"


def _read_responses(event: Json, said: Said) -> None:
    if event["type"] == "response.output_text.delta":
        said.text += event["delta"]
    elif event["type"] == "response.completed":
        said.is_whole = True
        if _text_of_response(event["response"]) != said.text:
            raise Malformed("the completed response has another text than its stream")


def _text_of_response(response: Json) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def _read_ollama(event: Json, said: Said) -> None:
    said.text += event["message"]["content"] if "message" in event else event["response"]
    said.is_whole = event["done"]


def _read_generate(event: Json, said: Said) -> None:
    said.text += event["text"]


FORMS: dict[str, Form] = {
    "chat": Form(
        "/v1/chat/completions",
        lambda prompt: {"messages": _messages(prompt)},
        lambda answer: answer["choices"][0]["message"]["content"],
        _read_chat,
        _openai_error,
    ),
    "completions": Form(
        "/v1/completions",
        lambda prompt: {"prompt": prompt},
        lambda answer: answer["choices"][0]["text"],
        _read_completion,
        _openai_error,
    ),
    "messages": Form(
        "/v1/messages",
        lambda prompt: {"messages": _messages(prompt), "max_tokens": 100},
        lambda answer: "".join(part["text"] for part in answer["content"]),
        _read_messages,
        lambda body: (body["error"]["type"], body["error"]["message"]),
    ),
    "responses": Form(
        "/v1/responses", lambda prompt: {"input": prompt}, _text_of_response, _read_responses, _openai_error
    ),
    "ollama chat": Form(
        "/api/chat",
        lambda prompt: {"messages": _messages(prompt)},
        lambda answer: answer["message"]["content"],
        _read_ollama,
        lambda body: ("", body["error"]),
        lines=True,
    ),
    "ollama generate": Form(
        "/api/generate",
        lambda prompt: {"prompt": prompt},
        lambda answer: answer["response"],
        _read_ollama,
        lambda body: ("", body["error"]),
        lines=True,
    ),
    "generate": Form(
        "/v1/generate", lambda prompt: {"prompt": prompt}, lambda answer: answer["text"], _read_generate, _openai_error
    ),
    "embeddings": Form(
        "/v1/embeddings",
        lambda prompt: {"input": prompt},
        lambda answer: answer["data"][0]["embedding"],
        None,
        _openai_error,
    ),
}
"""By name."""
