"""The events of a stream of Responses: their framing and numbers, and those of one output item."""

from typing import Any

import msgspec

from gateway.surfaces.responses.output_items import empty_part
from gateway.surfaces.surface import Json

_PIECE_CHARACTERS = 24
_MAX_PIECES = 256

# Of each kind of part: what its events of text begin with, and those of the part itself, and how they count parts.
_PARTS = {
    "output_text": ("response.output_text", "response.content_part", "content_index"),
    "refusal": ("response.refusal", "response.content_part", "content_index"),
    "reasoning_text": ("response.reasoning_text", "response.content_part", "content_index"),
    "summary_text": ("response.reasoning_summary_text", "response.reasoning_summary_part", "summary_index"),
}
# Of each kind of call: what its events begin with, and the field of what it calls with.
CALLS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}

_encode = msgspec.json.Encoder().encode


class EventWriter:
    """Frames events, each with the next number."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._next_number = 0

    def write(self, kind: str, fields: Json) -> None:
        self._pending.append(framed({"type": kind, "sequence_number": self._next_number, **fields}))
        self._next_number += 1

    def take(self) -> bytes:
        """The events since the last call."""
        pending, self._pending = self._pending, []
        return b"".join(pending)


def framed(event: Json) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), _encode(event))


class _Part:
    """A part of an item while its text is sent."""

    def __init__(self, kind: str, where: Json) -> None:
        self.kind = kind
        self.where = where
        self.text_events, self.part_events, _ = _PARTS[kind]
        self.pieces: list[str] = []
        self.logprobs: list[Json] = []
        self.annotations = 0
        self.done: Json | None = None

    def whole(self) -> Json:
        name = "refusal" if self.kind == "refusal" else "text"
        part = {**empty_part(self.kind), name: "".join(self.pieces)}
        return {**part, "logprobs": list(self.logprobs)} if self.kind == "output_text" else part


class ItemStream:
    """Writes the events of an output item: added, deltas of its parts or arguments, and done.

    `item` is the item before there is anything in it. Several may be written at the same time.
    """

    def __init__(self, events: EventWriter, output_index: int, item: Json) -> None:
        self.item = item
        self.done: Json | None = None
        self._events = events
        self._place = {"item_id": item.get("id"), "output_index": output_index}
        self._parts: list[_Part] = []
        self._places: set[tuple[str, int]] = set()
        self._pieces: list[str] = []
        events.write("response.output_item.added", {"output_index": output_index, "item": item})

    def add_text(self, kind: str, text: str, logprobs: list[Json]) -> None:
        """Text of the part of this kind, which begins with it if there is none."""
        part = next((part for part in self._parts if part.kind == kind), None)
        self._add(part or self._open(kind, len(self._parts)), text, logprobs)

    def add_arguments(self, text: str) -> None:
        """What a call calls with, or a piece of it."""
        self._pieces.append(text)
        self._events.write(f"{CALLS[self.item['type']][0]}.delta", {**self._place, "delta": text})

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)

    def whole(self) -> Json:
        """The item with what has been sent of it."""
        item = {**self.item, "status": "completed"} if "status" in self.item else dict(self.item)
        if item["type"] in CALLS:
            return {**item, CALLS[item["type"]][1]: self.arguments}
        return {**item, "content": [part.whole() for part in self._parts]}

    def finish(self, item: Json) -> None:
        """Write what has not been sent of the item, and that it is done, unless the same has been written before."""
        if self.done == item:
            return
        if item.get("type") in CALLS:
            self._finish_call(item)
        elif item.get("type") in ("message", "reasoning"):
            for field in ("summary", "content"):
                self._finish_parts(item.get(field))
        self.done = item
        self._events.write("response.output_item.done", {"output_index": self._place["output_index"], "item": item})

    def _finish_call(self, item: Json) -> None:
        events, field = CALLS[item["type"]]
        whole = item.get(field)
        for piece in _pieces(_rest(self.arguments, whole)):
            self.add_arguments(piece)
        self._events.write(f"{events}.done", {**self._place, field: whole})

    def _finish_parts(self, finals: Any) -> None:
        begun = {part.kind: part for part in self._parts}
        for position, final in enumerate(finals if isinstance(finals, list) else ()):
            kind = final.get("type") if isinstance(final, dict) else None
            if isinstance(kind, str) and kind in _PARTS:
                part = begun.pop(kind) if kind in begun else self._open(kind, position)
                self._finish_part(part, final)

    def _finish_part(self, part: _Part, final: Json) -> None:
        if part.done == final:
            return
        part.done = final
        name = "refusal" if part.kind == "refusal" else "text"
        logprobs = final.get("logprobs")
        tokens = logprobs[len(part.logprobs) :] if isinstance(logprobs, list) else []
        rest = _rest("".join(part.pieces), final.get(name))
        for text, own in _by_token(rest, tokens):
            self._add(part, text, own)
        annotations = final.get("annotations")
        for annotation in annotations[part.annotations :] if isinstance(annotations, list) else ():
            added = {**part.where, "annotation_index": part.annotations, "annotation": annotation}
            self._events.write("response.output_text.annotation.added", added)
            part.annotations += 1
        given = {"logprobs": _event_logprobs(logprobs)} if part.kind == "output_text" else {}
        self._events.write(f"{part.text_events}.done", {**part.where, name: final.get(name), **given})
        self._events.write(f"{part.part_events}.done", {**part.where, "part": final})

    def _open(self, kind: str, position: int) -> _Part:
        """Begin a part, at the next free place if its own is taken. The one before it is done."""
        if self._parts and self._parts[-1].done is None:
            self._finish_part(self._parts[-1], self._parts[-1].whole())
        counter = _PARTS[kind][2]
        if (counter, position) in self._places:
            position = len(self._parts)
        self._places.add((counter, position))
        part = _Part(kind, {**self._place, counter: position})
        self._parts.append(part)
        self._events.write(f"{part.part_events}.added", {**part.where, "part": empty_part(kind)})
        return part

    def _add(self, part: _Part, text: str, logprobs: list[Json]) -> None:
        part.pieces.append(text)
        part.logprobs += logprobs
        given = {"logprobs": _event_logprobs(logprobs)} if part.kind == "output_text" else {}
        self._events.write(f"{part.text_events}.delta", {**part.where, "delta": text, **given})


def _rest(sent: str, whole: Any) -> str:
    return whole[len(sent) :] if isinstance(whole, str) and whole.startswith(sent) else ""


def _pieces(text: str) -> list[str]:
    """Pieces of a few words, as in a stream; of a long text a few hundred larger ones."""
    size = max(_PIECE_CHARACTERS, -(-len(text) // _MAX_PIECES))
    return [text[start : start + size] for start in range(0, len(text), size)]


def _by_token(text: str, logprobs: list[Any]) -> list[tuple[str, list[Json]]]:
    """A text by its tokens, each with its log probabilities; else in pieces, and they come when the text is done."""
    tokens = [token.get("token") if isinstance(token, dict) else None for token in logprobs]
    if tokens and all(isinstance(token, str) for token in tokens) and "".join(map(str, tokens)) == text:
        return [(str(token), [logprob]) for token, logprob in zip(tokens, logprobs, strict=True)]
    return [(piece, []) for piece in _pieces(text)]


def _event_logprobs(logprobs: Any) -> list[Json]:
    """Log probabilities as events have them: without bytes."""
    tokens = [token for token in logprobs if isinstance(token, dict)] if isinstance(logprobs, list) else []
    return [
        {
            name: value if name != "top_logprobs" else _event_logprobs(value)
            for name, value in token.items()
            if name != "bytes"
        }
        for token in tokens
    ]
