"""Writes blocks into a stream, one after the other, and keeps them."""

from gateway.surfaces.messages.arguments import input_of
from gateway.surfaces.messages.streams import event, input_delta, signature_delta, text_delta, thinking_delta
from gateway.surfaces.surface import Json

_DELTAS = {"text": text_delta, "thinking": thinking_delta, "tool_use": input_delta}


class BlockWriter:
    """Its methods write events; `taken` returns them. One block is open at a time."""

    def __init__(self) -> None:
        self.blocks: list[Json] = []
        """The blocks that have been closed."""
        self._open: Json | None = None
        self._pieces: list[str] = []
        self._events: list[bytes] = []

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def taken(self) -> bytes:
        """The events since the last call."""
        events, self._events = b"".join(self._events), []
        return events

    def open(self, block: Json) -> None:
        """Begin a block; its text or input, which comes in pieces, is empty here."""
        self._open = dict(block)
        self._events.append(event("content_block_start", index=len(self.blocks), content_block=block))

    def add(self, piece: str) -> None:
        """A piece of the open block's text or input."""
        if self._open is not None:
            self._pieces.append(piece)
            self._delta(_DELTAS[self._open["type"]](piece))

    def sign(self, signature: str) -> None:
        """The signature of the open block of thoughts."""
        if self._open is not None:
            self._open["signature"] = signature
            self._delta(signature_delta(signature))

    def close(self) -> None:
        """End the open block, if there is one."""
        if self._open is None:
            return
        block, text = self._open, "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = input_of(text)
        elif block["type"] in _DELTAS:
            block[block["type"]] = text
        self._events.append(event("content_block_stop", index=len(self.blocks)))
        self.blocks.append(block)
        self._open, self._pieces = None, []

    def _delta(self, delta: Json) -> None:
        self._events.append(event("content_block_delta", index=len(self.blocks), delta=delta))
