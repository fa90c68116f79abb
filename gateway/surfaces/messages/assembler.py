"""Records a stream of a server that has Messages."""

from typing import Any

from cache.errors import UnstorableAnswer
from gateway.http.sse import event_data, event_json
from gateway.surfaces.messages.answers import is_message
from gateway.surfaces.messages.arguments import input_of
from gateway.surfaces.surface import Assembler, Json

# The texts of a block that come in pieces: the delta's type, its field, and the block's.
_TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


class _Block:
    """A block of which pieces arrive; they are joined once, so that a long answer costs linear time."""

    def __init__(self, fields: Json) -> None:
        self.open = True
        self._fields = dict(fields)
        self._pieces: dict[str, list[str]] = {}
        self._citations: list[Any] = []

    def add(self, delta: Json) -> None:
        kind = _of(str, delta, "type")
        if kind in _TEXTS:
            self._pieces.setdefault(_TEXTS[kind], []).append(_of(str, delta, _TEXTS[kind]))
        elif kind == "signature_delta":
            self._fields["signature"] = _of(str, delta, "signature")
        elif kind == "citations_delta":
            self._citations.append(delta.get("citation"))
        elif kind == "compaction_delta":
            self._fields |= {name: value for name, value in delta.items() if name != "type"}
        else:
            raise UnstorableAnswer("the stream has a delta of an unknown type")

    def whole(self) -> Json:
        if self.open:
            raise UnstorableAnswer("the stream ended within a block")
        fields = dict(self._fields)
        for name, pieces in self._pieces.items():
            text = "".join(pieces)
            if name != "partial_json":
                fields[name] = _of(str, {name: "", **fields}, name) + text
            elif text:
                fields["input"] = input_of(text)
        if self._citations:
            fields["citations"] = _of(list, {"citations": fields.get("citations") or []}, "citations") + self._citations
        return fields


class MessageAssembler(Assembler):
    """Builds the message from its events. Those of unknown types say nothing about it."""

    def __init__(self) -> None:
        self._message: Json = {}
        self._blocks: list[_Block] = []
        self._fault: str | None = None

    def add(self, event: bytes) -> None:
        data = event_data(event)
        if not data or self.done:
            return
        try:
            event_fields = event_json(data)
            self.done = event_fields.get("type") in ("message_stop", "error")
            self._take(event_fields)
        except (ValueError, UnstorableAnswer) as error:
            self._fault = self._fault or str(error)

    def answer(self) -> Json:
        if self._fault:
            raise UnstorableAnswer(self._fault)
        if not self.done:
            raise UnstorableAnswer("the stream ended without message_stop")
        message = {**self._message, "content": [block.whole() for block in self._blocks]}
        if not is_message(message) or not isinstance(message.get("stop_reason"), str):
            raise UnstorableAnswer("the stream has no whole message")
        return message

    def _take(self, event: Json) -> None:
        kind = event.get("type")
        if kind == "error":
            raise UnstorableAnswer("the stream carries an error")
        if kind == "message_start":
            self._message = dict(_of(dict, event, "message"))
        elif kind == "content_block_start":
            self._begin(_index(event), _of(dict, event, "content_block"))
        elif kind == "content_block_delta":
            self._block(event).add(_of(dict, event, "delta"))
        elif kind == "content_block_stop":
            self._block(event).open = False
        elif kind == "message_delta":
            self._end(event)

    def _begin(self, index: int, fields: Json) -> None:
        if index != len(self._blocks):
            raise UnstorableAnswer("the blocks of the stream are not in order")
        self._blocks.append(_Block(fields))
        served = fields.get("to")
        if fields.get("type") == "fallback" and isinstance(served, dict):
            _update(self._message, {"model": served.get("model")})

    def _block(self, event: Json) -> _Block:
        index = _index(event)
        if not 0 <= index < len(self._blocks) or not self._blocks[index].open:
            raise UnstorableAnswer("the stream continues a block that is not open")
        return self._blocks[index]

    def _end(self, event: Json) -> None:
        rest = {name: value for name, value in event.items() if name not in ("delta", "usage")}
        news = _of(dict, event, "delta") | rest
        _update(self._message, {name: value for name, value in news.items() if name != "type"})
        usage = event.get("usage")
        if isinstance(usage, dict) and usage:
            known = self._message.get("usage")
            counts = dict(known) if isinstance(known, dict) else {}
            _update(counts, usage)
            self._message["usage"] = counts


def _update(fields: Json, news: Json) -> None:
    """Later values count, but null is none."""
    fields |= {name: value for name, value in news.items() if value is not None or name not in fields}


def _index(event: Json) -> int:
    index: int = _of(int, event, "index")
    return index


def _of(kind: type, fields: Json, name: str) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise UnstorableAnswer(f"the {name} of an event is no {kind.__name__}")
    return value
