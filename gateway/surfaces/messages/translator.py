"""Makes the stream of a message from the chunks of a chat completion, as they arrive."""

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator

from cache.entries.answer import StreamAssembler
from cache.errors import UnstorableAnswer
from gateway.errors import UpstreamDisconnected
from gateway.surfaces.messages.answers import message_of, own_id
from gateway.surfaces.messages.arguments import ObjectEnd
from gateway.surfaces.messages.assistant_turn import (
    THINKING_BLOCKS,
    calls_of,
    is_blocks,
    text_in,
    thought_in,
    tool_use_of,
)
from gateway.surfaces.messages.block_writer import BlockWriter
from gateway.surfaces.messages.streams import ending, event
from gateway.surfaces.surface import Json, Translator

_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
_BEGUN: Json = {
    "type": "message",
    "role": "assistant",
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": dict.fromkeys(_COUNTS, 0),
}
_TEXT: Json = {"type": "text", "text": ""}
_THINKING: Json = {"type": "thinking", "thinking": "", "signature": ""}


@contextlib.contextmanager
def _disconnected() -> Iterator[None]:
    try:
        yield
    except UnstorableAnswer as reason:
        raise UpstreamDisconnected(f"The upstream's answer is not whole: {reason}.") from reason


class _Call:
    """What is known of a tool call; it begins in the stream with the first piece of its arguments."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.end = ObjectEnd()
        self._fields: Json = {}
        self._name = ""

    def add(self, call: Json) -> str:
        """Take in a piece of the call; the piece of its arguments."""
        self._fields |= {field: value for field, value in call.items() if value}
        name = text_in(call["function"], "name")
        self._name += "" if name == self._name else name  # some servers repeat it
        return text_in(call["function"], "arguments")

    @property
    def block(self) -> Json:
        return tool_use_of({**self._fields, "function": {"name": self._name}}, self.at)


class MessagesTranslator(Translator):
    """Writes the blocks one after the other, as Anthropic does.

    Until the arguments of a tool call are a whole JSON object, pieces of other blocks wait: a client gets what belongs
    to one block in one piece, even where a server mixes calls.
    """

    def __init__(self, entry_id: str) -> None:
        self._entry_id = entry_id
        self._assembler = StreamAssembler()
        self._names: Json = {}
        self._opening: Json | None = None
        self._blocks = BlockWriter()
        self._calls: dict[Hashable, _Call] = {}
        self._current: Hashable = None
        self._closed: set[Hashable] = set()
        self._waiting: OrderedDict[Hashable, list[str]] = OrderedDict()
        # Characters of thoughts: written, told in blocks, told as a text.
        self._thoughts = self._signed_thoughts = self._told_thoughts = 0
        self._spoke = False

    def add(self, chunk: Json) -> bytes:
        """Raises UpstreamDisconnected for what is no chunk of an answer."""
        with _disconnected():
            self._assembler.add(chunk)
        for name in ("id", "model"):
            self._names[name] = self._names.get(name) or text_in(chunk, name)
        opening = b""
        if self._opening is None and chunk["choices"]:
            opening = self._open()
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            if choice.get("index", 0) == 0 and isinstance(delta, dict):
                self._add(delta)
        return opening + self._blocks.taken()

    def finish(self) -> bytes:
        """Raises UpstreamDisconnected for an answer that is nested too deep."""
        opening = self._open() if self._opening is None else b""
        self._switch(None)
        while self._waiting:
            self._write_waiting()
        self._switch(None)
        with _disconnected():
            self.answer = message_of(self._assembler.response(), self._blocks.blocks, self._opening or {})
        return opening + self._blocks.taken() + ending(self.answer)

    def _open(self) -> bytes:
        names = {"id": own_id(self._names, self._entry_id), "model": self._names.get("model", "")}
        self._opening = names
        return event("message_start", message={**names, **_BEGUN})

    def _add(self, delta: Json) -> None:
        self._add_thoughts(delta)
        if text := text_in(delta, "content"):
            self._spoke = True
        elif not self._spoke:
            text = text_in(delta, "refusal")
        if text:
            self._put("text", text)
        for call in calls_of(delta):
            index = call.get("index")
            # A call without an index is whole.
            key: Hashable = index if isinstance(index, int) else f"call {len(self._calls)}"
            if key not in self._calls:
                self._calls[key] = _Call(len(self._calls))
            self._put(key, self._calls[key].add(call))

    def _add_thoughts(self, delta: Json) -> None:
        """Thoughts may come twice: as a text, and in pieces of blocks, which can be signed."""
        blocks = delta.get(THINKING_BLOCKS)
        for block in blocks if is_blocks(blocks) else ():
            if block["type"] == "redacted_thinking":
                self._write_whole(block)
            elif block["type"] == "thinking":
                self._signed_thoughts += len(text_in(block, "thinking"))
                self._add_thought(text_in(block, "thinking"), self._signed_thoughts)
                self._sign(text_in(block, "signature"))
        if thought := thought_in(delta):
            self._told_thoughts += len(thought)
            self._add_thought(thought, self._told_thoughts)

    def _add_thought(self, text: str, told: int) -> None:
        """Write what is new of `text`, after which `told` characters have come in its way."""
        if told > self._thoughts:
            self._put("thinking", text[self._thoughts - told :])
            self._thoughts = told

    def _sign(self, signature: str) -> None:
        if signature and self._signed_thoughts == self._thoughts and not self._is_blocked("thinking"):
            self._switch("thinking")
            if not self._blocks.is_open:
                self._blocks.open(_THINKING)
            self._blocks.sign(signature)
            self._switch(None)

    def _write_whole(self, block: Json) -> None:
        if not self._is_blocked(None):
            self._switch(None)
            self._blocks.open(block)
            self._blocks.close()

    def _put(self, key: Hashable, piece: str) -> None:
        """Write a piece of the block `key`, now or when it is its turn."""
        if key in self._closed:
            return
        if self._is_blocked(key):
            self._waiting.setdefault(key, []).append(piece)
            return
        self._switch(key)
        self._write(piece)
        while self._waiting and not self._is_blocked(next(iter(self._waiting))):
            self._write_waiting()

    def _write_waiting(self) -> None:
        key, pieces = self._waiting.popitem(last=False)
        self._switch(key)
        self._write("".join(pieces))

    def _is_blocked(self, key: Hashable) -> bool:
        call = self._calls.get(self._current)
        return call is not None and key != self._current and not call.end.reached

    def _switch(self, key: Hashable) -> None:
        """Close the open block, unless it is `key`, whose block begins with its first piece."""
        if key == self._current:
            return
        call = self._calls.get(self._current)
        if call is not None:
            self._closed.add(self._current)
            if not self._blocks.is_open:
                self._blocks.open(call.block)
        self._blocks.close()
        self._current = key

    def _write(self, piece: str) -> None:
        if not piece:
            return
        call = self._calls.get(self._current)
        if not self._blocks.is_open:
            self._blocks.open(call.block if call else _TEXT if self._current == "text" else _THINKING)
        self._blocks.add(piece)
        if call:
            call.end.add(piece)
