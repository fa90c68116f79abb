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
_OBJECT = re.compile(rb"\s*\{")

# Where each form of API has files, in base64 or a data URL. Text there is none that a model reads.
_FILE_FIELDS = frozenset({"url", "image_url", "data", "file_data", "images", "b64_json"})
_LEAST_FILE = 2**12
# What comes after so many values counts as text.
_MOST_VALUES = 10_000


def prompt_tokens(body: bytes, fields: Mapping[str, Any]) -> int:
    """Of a request with this body, whose JSON has these `fields`, if it is JSON. Images and other files in it count
    alike, by number and not by size; so does a body of another kind, such as a form with a recording.
    """
    if not body:
        return 0
    if not fields and not _OBJECT.match(body):
        return _TOKENS_PER_FILE
    size, files = len(body), 0
    if size > _LEAST_FILE:
        for text in _large_files(fields):
            size -= len(text)
            files += 1
    # What a conversation goes on from is among the fields, and may not be in the body.
    return max(0, size) // BYTES_PER_TOKEN + files * _TOKENS_PER_FILE


def output_tokens(fields: Mapping[str, Any], choices: int) -> int:
    """The most that an answer to a request with these fields may have."""
    for field in _OUTPUT_FIELDS:
        value = fields.get(field)
        if type(value) is int and value > 0:
            return min(value * choices, _MOST_TOKENS)
    return _USUAL_OUTPUT_TOKENS * choices


def _large_files(fields: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    values: list[tuple[str, Any]] = [("", fields)]
    for _ in range(_MOST_VALUES):
        if not values:
            break
        name, value = values.pop()
        match value:
            case str() if len(value) >= _LEAST_FILE and name in _FILE_FIELDS and value.isascii() and " " not in value:
                found.append(value)
            case list():
                values += ((name, item) for item in value)
            case dict():
                values += value.items()
    return found
