"""Takes tool calls out of an answer while it is being written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from backend.chat.tool_format import ToolFormat


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Something new of one call."""

    index: int
    """Place of the call in the answer, from 0."""
    arguments: str
    """Piece of the arguments, which are JSON as the model wrote it."""
    id: str | None = None
    """With the first piece of a call only, as is ``name``."""
    name: str | None = None


@dataclass(slots=True)
class ParsedDelta:
    """What a piece of an answer holds."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolParser:
    """Follows one answer. What may be the start of a marker is held back until it is known.

    text text <tool_call> \\n {"name": "f", "arguments": {...} } \\n</tool_call>
    └ content┘└─ between ──┘└──── head ─────────────────┘└args┘└─ between ───┘

    text text [TOOL_CALLS] f[ARGS] {...} [TOOL_CALLS] g[ARGS] {...}
    └ content┘└─ between ─┘└ head ┘└args┘└─ between ─┘└ head ┘└args┘
    """

    def __init__(self, form: ToolFormat) -> None:
        self.num_calls = 0
        """Calls that are whole."""
        self._form = form
        self._head = form.head()
        self._held = ""
        self._state = "content"
        self._blank = True
        """Nothing but white space so far."""
        self._index = -1
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def add(self, text: str) -> ParsedDelta:
        """Takes the next piece of the answer."""
        self._held += text
        pieces = ParsedDelta()
        if self._state == "content":
            pieces.content = self._content()
        while self._state != "content" and self._held and self._advance(pieces):
            pass
        return pieces

    def finish(self) -> ParsedDelta:
        """What was held back, when the answer has ended: text is text then, and half a call's name is nothing."""
        content = self._held if self._state == "content" else ""
        self._held = ""
        return ParsedDelta(content)

    def _content(self) -> str:
        """Moves text that belongs to no call out of what is held."""
        begin, text = self._form.begin, self._held
        if not begin:
            return self._opens_with_a_brace()
        at = text.find(begin)
        if at >= 0:
            self._state = "head" if self._form.name_end else "between"
            self._held = text[at + len(begin) :]
            # A line break before the marker is the frame's, not an answer.
            return "" if self._blank and not text[:at].strip() else text[:at]
        keep = _begun(begin, text)
        content = text[: len(text) - keep]
        if self._blank and not content.strip():
            return ""
        self._blank, self._held = False, text[len(text) - keep :]
        return content

    def _opens_with_a_brace(self) -> str:
        text = self._held
        if self._blank and not text.strip():
            return ""
        if self._blank and text.lstrip().startswith("{"):
            self._state = "between"
            return ""
        self._blank, self._held = False, ""
        return text

    def _advance(self, pieces: ParsedDelta) -> bool:
        """One step through the calls; False: more text is needed."""
        if self._state == "between":
            return self._begin_call()
        if self._state == "head":
            head = self._head.match(self._held)
            if head is None:
                return False
            self._index += 1
            pieces.calls.append(ToolCallDelta(self._index, "", self._form.new_id(), self._name(head[1])))
            self._held, self._state = self._held[head.end() :], "arguments"
            return True
        if self._depth == 0:
            self._held = self._held.lstrip()  # white space after the colon, which came later than the colon
        end = self._end_of_arguments()
        piece = self._held[:end]
        if piece:
            pieces.calls.append(ToolCallDelta(self._index, piece))
        self._held = self._held[len(piece) :]
        if end is None:
            return False
        self._state = "between"
        self.num_calls += 1
        return True

    def _begin_call(self) -> bool:
        """Drops what stands before the next call, and its marker; False: more text is needed."""
        begin = self._form.begin if self._form.name_end else "{"
        at = self._held.find(begin)
        if at < 0:
            self._held = self._held[len(self._held) - _begun(begin, self._held) :]
            return False
        # A brace is of the call itself.
        self._held = self._held[at + len(begin) :] if self._form.name_end else self._held[at:]
        self._state = "head"
        return True

    def _name(self, written: str) -> str:
        name: str = written.strip() if self._form.name_end else json.loads(written)
        return name

    def _end_of_arguments(self) -> int | None:
        """Where in the held text the arguments' last brace has just passed."""
        for position, character in enumerate(self._held):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        return None


def _begun(marker: str, text: str) -> int:
    """How many characters at the end of ``text`` may be the start of ``marker``."""
    return next(n for n in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:n]))
