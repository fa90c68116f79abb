"""Parses tool calls out of an answer while it is generated."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from backend.chat.tool_format import ToolFormat


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A new part of one call."""

    index: int
    """Place of the call in the answer, from 0."""
    arguments: str
    """New part of the arguments: JSON text as the model wrote it."""
    id: str | None = None
    """Set in the first delta of a call only, as is ``name``."""
    name: str | None = None


@dataclass(slots=True)
class ParsedDelta:
    """Content and tool calls in a new part of an answer."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolParser:
    """Parses one answer. Text that may be the start of a marker is held back until more text decides.

    text text <tool_call> \\n {"name": "f", "arguments": {...} } \\n</tool_call>
    └ content┘└─ between ──┘└──── head ─────────────────┘└args┘└─ between ───┘

    text text [TOOL_CALLS] f[ARGS] {...} [TOOL_CALLS] g[ARGS] {...}
    └ content┘└─ between ─┘└ head ┘└args┘└─ between ─┘└ head ┘└args┘
    """

    def __init__(self, tool_format: ToolFormat) -> None:
        self.num_calls = 0
        """Complete calls so far."""
        self._format = tool_format
        self._head = tool_format.head()
        self._held = ""
        self._state = "content"
        self._blank = True
        """Nothing but white space so far."""
        self._index = -1
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def add(self, text: str) -> ParsedDelta:
        """Parses the next part of the answer."""
        self._held += text
        delta = ParsedDelta()
        if self._state == "content":
            delta.content = self._content()
        while self._state != "content" and self._held and self._advance(delta):
            pass
        return delta

    def finish(self) -> ParsedDelta:
        """Text held back at the end of the answer; an incomplete call head is dropped."""
        content = self._held if self._state == "content" else ""
        self._held = ""
        return ParsedDelta(content)

    def _content(self) -> str:
        """Removes and returns held text that belongs to no call."""
        begin, text = self._format.begin, self._held
        if not begin:
            return self._content_before_brace()
        at = text.find(begin)
        if at >= 0:
            self._state = "head" if self._format.name_end else "between"
            self._held = text[at + len(begin) :]
            # White space before the marker belongs to the format, not to the content.
            return "" if self._blank and not text[:at].strip() else text[:at]
        keep = partial_marker_length(begin, text)
        content = text[: len(text) - keep]
        if self._blank and not content.strip():
            return ""
        self._blank, self._held = False, text[len(text) - keep :]
        return content

    def _content_before_brace(self) -> str:
        text = self._held
        if self._blank and not text.strip():
            return ""
        if self._blank and text.lstrip().startswith("{"):
            self._state = "between"
            return ""
        self._blank, self._held = False, ""
        return text

    def _advance(self, delta: ParsedDelta) -> bool:
        """One step through the calls; False: more text is needed."""
        if self._state == "between":
            return self._begin_call()
        if self._state == "head":
            head = self._head.match(self._held)
            if head is None:
                return False
            self._index += 1
            delta.calls.append(ToolCallDelta(self._index, "", self._format.new_id(), self._name(head[1])))
            self._held, self._state = self._held[head.end() :], "arguments"
            return True
        if self._depth == 0:
            self._held = self._held.lstrip()  # white space after the colon
        end = self._end_of_arguments()
        arguments = self._held[:end]
        if arguments:
            delta.calls.append(ToolCallDelta(self._index, arguments))
        self._held = self._held[len(arguments) :]
        if end is None:
            return False
        self._state = "between"
        self.num_calls += 1
        return True

    def _begin_call(self) -> bool:
        """Drops the text before the next call and its marker; False: more text is needed."""
        begin = self._format.begin if self._format.name_end else "{"
        at = self._held.find(begin)
        if at < 0:
            self._held = self._held[len(self._held) - partial_marker_length(begin, self._held) :]
            return False
        # A brace belongs to the call, a marker does not.
        self._held = self._held[at + len(begin) :] if self._format.name_end else self._held[at:]
        self._state = "head"
        return True

    def _name(self, written: str) -> str:
        name: str = written.strip() if self._format.name_end else json.loads(written)
        return name

    def _end_of_arguments(self) -> int | None:
        """The position in the held text after the arguments' closing brace; None: not there yet."""
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


def partial_marker_length(marker: str, text: str) -> int:
    """The number of characters at the end of ``text`` that may start ``marker``."""
    return next(n for n in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:n]))
