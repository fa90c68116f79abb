"""Streams of Responses: made of the chunks of a chat completion, made of a whole answer, and recorded.

The reasoning of an open model is sent as `response.reasoning_text`, as vLLM and others send it, and not as a summary,
which is a text about the reasoning. Its part is a `content_part`, which OpenAI's clients know; the `reasoning_part` of
some servers they do not.
"""

from typing import Any

import msgspec

from cache.entries.answer import StreamAssembler
from cache.errors import UnstorableAnswer
from gateway.errors import UpstreamDisconnected
from gateway.http.sse import event_data, event_json
from gateway.surfaces.responses.answers import EXTENSION, NATIVE, begun, item_base, own_answer, response_id
from gateway.surfaces.responses.events import CALLS, EventWriter, ItemStream
from gateway.surfaces.responses.output_items import (
    call_item,
    message_item,
    own_logprobs,
    reasoning_in,
    reasoning_item,
    text_in,
)
from gateway.surfaces.surface import Assembler, ChatRequest, Json, Translator

_ENDS = ("response.completed", "response.incomplete")

_decode = msgspec.json.Decoder().decode


class _Call:
    """A call as its pieces arrive, merged as `StreamAssembler` does it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.fields: Json = {}
        self.name: list[str] = []
        self.waiting: list[str] = []
        self.stream: ItemStream | None = None

    def add(self, piece: Json) -> None:
        for field in ("id", "type"):
            if (value := piece.get(field)) and isinstance(value, str):
                self.fields[field] = value
        for kind, argument in (("function", "arguments"), ("custom", "input")):
            if isinstance(tool := piece.get(kind), dict):
                name, text = tool.get("name"), tool.get(argument)
                if isinstance(name, str) and name and self.name != [name]:
                    self.name.append(name)
                self.fields[kind] = {"name": "".join(self.name)}
                if isinstance(text, str) and text:
                    self.waiting.append(text)

    @property
    def is_named(self) -> bool:
        return bool(self.name) and "id" in self.fields

    def send(self) -> None:
        if self.stream is not None:
            for text in self.waiting:
                self.stream.add_arguments(text)
            self.waiting.clear()


class ResponseTranslator(Translator):
    """The events of a Response from the chunks of a chat completion.

    An item is done when the next one begins. Text that comes for it after that is sent all the same, and then it is
    done once more at the end. The items of the answer have one order (output_items.py); an item that begins out of
    turn gets the next free `output_index`.
    """

    def __init__(self, request: ChatRequest, entry_id: str) -> None:
        self._request = request
        self._entry_id = entry_id
        self._assembler = StreamAssembler()
        self._events = EventWriter()
        self._named: Json = {}  # the first id, creation time and model that are not empty
        self._base: str | None = None
        self._held = False
        self._items: dict[Any, ItemStream] = {}
        self._last: ItemStream | None = None
        self._calls: list[_Call] = []
        self._calls_opened = 0
        self._calls_by_index: dict[int, _Call] = {}
        self._call_ids: set[str] = set()

    def add(self, chunk: Json) -> bytes:
        """Raises UpstreamDisconnected for what is no chunk of an answer."""
        try:
            self._assembler.add(chunk)
        except UnstorableAnswer as reason:
            raise UpstreamDisconnected(f"The upstream's answer is not whole: {reason}.") from reason
        if isinstance(chunk.get(NATIVE), dict):  # the id of its Response is known when it is whole
            self._held = self._base is None
        for field in ("id", "created", "model"):
            self._named[field] = self._named.get(field) or chunk.get(field)
        for choice in () if self._held else chunk["choices"]:
            self._begin()
            if choice.get("index", 0) == 0 and isinstance(delta := choice.get("delta"), dict):
                self._add_delta(delta, own_logprobs(choice.get("logprobs")))
        return self._events.take()

    def finish(self) -> bytes:
        """Raises UpstreamDisconnected for an answer that is nested too deep."""
        try:
            self.answer = own_answer(self._assembler.response(), self._request, self._entry_id)
        except UnstorableAnswer as reason:
            raise UpstreamDisconnected(f"The upstream's answer is not whole: {reason}.") from reason
        if self._base is None:
            return own_stream(self.answer)
        for item in self.answer["output"]:
            stream = self._items.get(item.get("id"))
            if stream is None:
                stream = self._open(_unfilled(item))
            stream.finish(item)
        self._events.write(*_ending(self.answer))
        return self._events.take()

    def _begin(self) -> None:
        if self._base is None:
            created = self._named.get("created")
            self._base = item_base(self._entry_id, self._named.get("id"), created)
            _write_beginning(
                self._events,
                begun(response_id(self._base, self._request), created, self._named.get("model"), self._request),
            )

    def _add_delta(self, delta: Json, logprobs: list[Json]) -> None:
        if text := reasoning_in(delta):
            self._item(reasoning_item).add_text("reasoning_text", text, [])
        if content := text_in(delta.get("content")):
            self._item(message_item).add_text("output_text", content, logprobs)
        if (refusal := delta.get("refusal")) and isinstance(refusal, str):
            self._item(message_item).add_text("refusal", refusal, [])
        calls = delta.get("tool_calls")
        for piece in calls if isinstance(calls, list) else ():
            self._add_call(piece)

    def _item(self, make: Any) -> ItemStream:
        item = make(self._base)
        return self._items.get(item["id"]) or self._open(item)

    def _open(self, item: Json) -> ItemStream:
        last = self._last
        if last and last.done is None and (last.item["type"] not in CALLS or _is_object(last.arguments)):
            last.finish(last.whole())  # more may come for another call: its end is that of the answer
        self._last = self._items[item.get("id")] = ItemStream(self._events, len(self._items), item)
        return self._last

    def _add_call(self, piece: Any) -> None:
        index = piece.get("index") if isinstance(piece, dict) else None
        call = self._calls_by_index.get(index) if isinstance(index, int) else None
        if call is None:
            call = _Call(len(self._calls))
            self._calls.append(call)
            if isinstance(index, int):
                self._calls_by_index[index] = call
        if not isinstance(piece, dict):
            return
        call.add(piece)
        if call.waiting and call.is_named:
            while self._calls_opened <= call.number:  # those before it, which may have no arguments, come first
                self._open_call(self._calls[self._calls_opened])
                self._calls_opened += 1
        call.send()

    def _open_call(self, call: _Call) -> None:
        item = call_item(self._base or "", call.number, call.fields, self._call_ids, self._request.echo.get("tools"))
        if item is not None:
            call.stream = self._open(item)
            call.send()


def own_stream(answer: Json) -> bytes:
    """A whole Response as the body of a stream."""
    events = EventWriter()
    ended: Json = {"status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None}
    beginning = {name: value for name, value in answer.items() if name not in (EXTENSION, "completed_at")}
    _write_beginning(events, {**beginning, **ended})
    for index, item in enumerate(answer["output"]):
        ItemStream(events, index, _unfilled(item)).finish(item)
    events.write(*_ending(answer))
    return events.take()


def _write_beginning(events: EventWriter, response: Json) -> None:
    events.write("response.created", {"response": response})
    events.write("response.in_progress", {"response": response})


def _ending(answer: Json) -> tuple[str, Json]:
    kind = "response.incomplete" if answer.get("status") == "incomplete" else "response.completed"
    return kind, {"response": answer}


def _unfilled(item: Json) -> Json:
    """An item before there is anything in it."""
    empty: Json = {"status": "in_progress"} if "status" in item else {}
    kind = item.get("type")
    if kind in CALLS:
        empty[CALLS[kind][1]] = ""
    elif kind in ("message", "reasoning"):
        empty |= {name: [] for name in ("content", "summary") if isinstance(item.get(name), list)}
    return {**item, **empty}


def _is_object(text: str) -> bool:
    """Whether the text is a whole JSON object, to which nothing can be added."""
    try:
        return text.startswith("{") and isinstance(_decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


class ResponseAssembler(Assembler):
    """Records the Response object that a stream ends with."""

    def __init__(self) -> None:
        self._response: Any = None
        self._items: dict[int, Any] = {}
        self._fault: str | None = None

    def add(self, event: bytes) -> None:
        data = event_data(event)
        if not data or data == b"[DONE]" or self.done:
            return
        try:
            self._read(event_json(data))
        except ValueError as error:
            self._fault = str(error)

    def _read(self, fields: Json) -> None:
        kind = fields.get("type")
        if kind in _ENDS:
            self._response, self.done = fields.get("response"), True
        elif kind == "response.output_item.done" and type(fields.get("output_index")) is int:
            self._items[fields["output_index"]] = fields.get("item")
        elif kind in ("error", "response.failed") or fields.get("error") is not None:
            self._fault, self.done = "the stream carries an error", True

    def answer(self) -> Json:
        if self._fault:
            raise UnstorableAnswer(self._fault)
        if not isinstance(self._response, dict):
            raise UnstorableAnswer("the stream did not end with a response")
        if not self._response.get("output") and self._items:  # some servers leave out what they have sent before
            return {**self._response, "output": [self._items[index] for index in sorted(self._items)]}
        return self._response
