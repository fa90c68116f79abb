"""The arguments of a tool call: a text in chat completions, an object in Messages."""

import re
from typing import Any

import msgspec

from gateway.surfaces.surface import Json

RAW = "__raw"
"""The field of an input that holds, alone, arguments that are not the text of a JSON object."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_MARK = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)


def input_of(arguments: str) -> Json:
    """The input that arguments stand for; no text at all is an empty object."""
    parsed = _object(arguments or "{}")
    return {RAW: arguments} if parsed is None else parsed


def arguments_of(tool_input: Json) -> str:
    """The inverse. Raises ValueError or RecursionError for what JSON cannot say."""
    raw = tool_input.get(RAW)
    if len(tool_input) == 1 and isinstance(raw, str) and raw and _object(raw) is None:
        return raw
    return json_of(tool_input)


def json_of(value: Any) -> str:
    """Compact JSON text. Raises ValueError (UnicodeEncodeError is one) or RecursionError for what JSON cannot say."""
    return _encode(value).decode()


def _object(text: str) -> Json | None:
    try:
        value = _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class ObjectEnd:
    """Finds where a JSON object ends that comes in pieces, in time linear in its length."""

    __slots__ = ("_depth", "_in_string", "_skip", "reached")

    def __init__(self) -> None:
        self.reached = False
        self._depth = 0
        self._in_string = False
        self._skip = False  # the last piece ended with a backslash

    def add(self, piece: str) -> None:
        start = 1 if self._skip and piece else 0
        self._skip = self._skip and not piece
        for match in _MARK.finditer(piece, start):
            mark = match[0]
            if mark[0] == "\\":
                self._skip = len(mark) == 1
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                self.reached = self.reached or self._depth <= 0
