"""How many tokens a request may use, before its upstream has counted them."""

import re
from collections.abc import Mapping
from typing import Any

BYTES_PER_TOKEN = 4
"""Of English text."""
# Anthropic scales images down to about so many tokens, OpenAI to fewer.
_TOKENS_PER_FILE = 1_600
_OUTPUT_FIELDS = ("max_completion_tokens", "max_tokens")
# Of an answer without a limit.
_USUAL_OUTPUT_TOKENS = 256
_MOST_TOKENS = 2**31

# A file in base64, perhaps in a data URL: no text has so long a word.
_FILE = re.compile(r"(?:data:[\w.+/;=-]{,128},)?[A-Za-z0-9+/_-]{512}")
_LEAST_FILE = 2**12
# What comes after so many values counts as text.
_MOST_VALUES = 10_000


def prompt_tokens(body: bytes, fields: Mapping[str, Any]) -> int:
    """Of a request with this body, whose JSON has these `fields`. Images and other files in it count alike, by number
    and not by size; so does a body of another kind, such as a form with a recording.
    """
    if not body[:16].lstrip().startswith(b"{"):
        return _TOKENS_PER_FILE if body else 0
    size, files = len(body), 0
    if size > _LEAST_FILE:
        for text in _large_texts(fields):
            if _FILE.match(text):
                size -= len(text)
                files += 1
    return size // BYTES_PER_TOKEN + files * _TOKENS_PER_FILE


def output_tokens(fields: Mapping[str, Any], choices: int) -> int:
    """The most that an answer to a request with these fields may have."""
    for field in _OUTPUT_FIELDS:
        value = fields.get(field)
        if type(value) is int and value > 0:
            return min(value * choices, _MOST_TOKENS)
    return _USUAL_OUTPUT_TOKENS * choices


def _large_texts(fields: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    values: list[Any] = [fields]
    for _ in range(_MOST_VALUES):
        if not values:
            break
        match values.pop():
            case str() as text if len(text) >= _LEAST_FILE:
                found.append(text)
            case list() as items:
                values += items
            case dict() as members:
                values += members.values()
    return found
