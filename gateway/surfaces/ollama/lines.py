"""Streams of Ollama's form: a line of JSON for each piece, and a last one with `done` and all that is not text."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from cache.entries.answer import StreamAssembler
from cache.errors import UnstorableAnswer
from gateway.surfaces.ollama.answers import REASONING, Shape, own_answer, token_logprobs
from gateway.surfaces.surface import Assembler, Json, Translator
from gateway.surfaces.timestamps import rfc3339

STREAM_TYPE = "application/x-ndjson"

_PIECE_CHARACTERS = 24
_MAX_PIECES = 256
_LISTS = ("tool_calls", "logprobs")  # each line has more of them

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def line_of(fields: Json) -> bytes:
    return _encode(fields) + b"\n"


def stream_of(own: Json, shape: Shape) -> bytes:
    """A whole answer as lines: thinking and text in pieces of a few words, the tool calls, and the last line."""
    said = shape.said(own)
    pieces: list[Json] = [{"thinking": piece} for piece in _pieces(said.get("thinking"))]
    pieces += [{shape.text: piece} for piece in _pieces(said.get(shape.text))]
    lines = [{**_head(own), **shape.placed(_opening(said, shape) | piece), "done": False} for piece in pieces]
    return b"".join(map(line_of, lines)) + _ending(own, shape)


def _head(own: Json) -> Json:
    return {name: own[name] for name in ("model", "created_at") if name in own}


def _opening(said: Json, shape: Shape) -> Json:
    """What every line says beside its piece."""
    empty = {shape.text: ""} if isinstance(said.get(shape.text), str) else {}
    return {name: said[name] for name in ("role",) if name in said} | empty


def _ending(own: Json, shape: Shape) -> bytes:
    """The lines after the text of an answer: its tool calls, if there are any, and the last one."""
    said = shape.said(own)
    calls = {"tool_calls": said["tool_calls"]} if said.get("tool_calls") else {}
    sent = {name for name in ("thinking", *calls) if said.get(name)}
    last = {name: value for name, value in said.items() if name not in sent} | _opening(said, shape)
    end = line_of({**shape.rest(own), **(shape.placed(last) if said else {}), "done": True})
    if not calls:
        return end
    return line_of({**_head(own), **shape.placed(_opening(said, shape) | calls), "done": False}) + end


def _pieces(text: Any) -> Iterator[str]:
    if isinstance(text, str):
        size = max(_PIECE_CHARACTERS, -(-len(text) // _MAX_PIECES))
        yield from (text[start : start + size] for start in range(0, len(text), size))


class LineTranslator(Translator):
    """Makes lines of the chunks of a chat completion, or of a completion.

    Thinking and text are sent as they arrive, and tool calls at the end, since a line has whole ones. `clock` counts
    nanoseconds; the time to the first chunk counts as that of the prompt.
    """

    def __init__(self, shape: Shape, clock: Callable[[], int]) -> None:
        self._shape = shape
        self._clock = clock
        self._began = clock()
        self._first: int | None = None
        self._assembler = StreamAssembler()
        self._head: Json = {"model": None, "created_at": rfc3339(0)}
        self._reasoning: str | None = None
        self._failed = False

    def add(self, chunk: Json) -> bytes:
        """A line for the text of a chunk. An error of the upstream is the last line."""
        if self._failed:
            return b""
        if self._first is None:
            self._first = self._clock()
        try:
            self._assembler.add(chunk)
        except UnstorableAnswer as reason:
            if chunk.get("error") is None:
                return b""  # no chunk of an answer: it says nothing to a client
            self._failed = True
            return line_of({"error": _message_of(chunk["error"]) or str(reason)})
        if chunk.get("model"):
            self._head["model"] = chunk["model"]
        if chunk.get("created"):
            self._head["created_at"] = rfc3339(chunk["created"])
        choice: Json = next((choice for choice in chunk["choices"] if choice.get("index", 0) == 0), {})
        said, tokens = self._said(choice), token_logprobs(choice)
        if not said and not tokens:
            return b""
        said = {"role": "assistant", self._shape.text: "", **said}
        logprobs = {"logprobs": tokens} if tokens else {}
        return line_of({**self._head, **self._shape.placed(said), **logprobs, "done": False})

    def _said(self, choice: Json) -> Json:
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            text = choice.get("text")
            return {self._shape.text: text} if isinstance(text, str) and text else {}
        said: Json = {}
        names = REASONING if self._reasoning is None else (self._reasoning,)
        for name in names:
            if isinstance(delta.get(name), str) and delta[name]:
                self._reasoning = name
                said["thinking"] = delta[name]
                break
        if isinstance(delta.get("content"), str) and delta["content"]:
            said[self._shape.text] = delta["content"]
        return said

    def finish(self) -> bytes:
        """The tool calls, and the last line. Nothing after an error."""
        self.answer = {}
        if self._failed:
            return b""
        try:
            self.answer = own_answer(self._assembler.response(), self._shape)
        except UnstorableAnswer as reason:
            return line_of({"error": str(reason)})
        now = self._clock()
        first = now if self._first is None else self._first
        self.answer |= {
            "total_duration": now - self._began,
            "prompt_eval_duration": first - self._began,
            "eval_duration": now - first,
        }
        return _ending({name: value for name, value in self.answer.items() if name != "logprobs"}, self._shape)


def _message_of(error: Any) -> str | None:
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None


class LineAssembler(Assembler):
    """Puts the lines of a stream of Ollama's together. Of fields that are there repeatedly the last value counts."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._fault: str | None = None
        self._answer: Json = {}
        self._said: Json = {}
        self._pieces: dict[str, list[str]] = {}

    def add(self, event: bytes) -> None:
        if self._fault or self.done or not event.strip():
            return
        try:
            line = _decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fault = f"a line is not JSON: {error}"
            return
        if not isinstance(line, dict):
            self._fault = "a line is not an object"
        elif line.get("error") is not None:
            self._fault = "the stream carries an error"
        else:
            self._add(line)

    def _add(self, line: Json) -> None:
        for name, value in self._shape.said(line).items():
            if name in (self._shape.text, "thinking") and isinstance(value, str):
                self._pieces.setdefault(name, []).append(value)
            else:
                _put(self._said, name, value)
        for name, value in self._shape.rest(line).items():
            _put(self._answer, name, value)
        self.done = line.get("done") is True

    def answer(self) -> Json:
        if self._fault:
            raise UnstorableAnswer(self._fault)
        if not self.done:
            raise UnstorableAnswer("the stream ended without a line that is done")
        said = self._said | {name: "".join(pieces) for name, pieces in self._pieces.items()}
        return {**self._answer, **(self._shape.placed(said) if said else {})}


def _put(known: Json, name: str, value: Any) -> None:
    if name in _LISTS and isinstance(value, list) and isinstance(known.get(name), list):
        known[name] += value
    else:
        known[name] = value
