"""The content of a turn: blocks of Messages as parts of chat completions.

A part has what the block says in chat completions' words, its `cache_control`, and under `anthropic` all else that the
block says. A block without a form in chat completions stays as it is, and is reported as such.
"""

import re
from collections.abc import Iterable
from typing import Any

from gateway.errors import InvalidRequest
from gateway.surfaces.surface import Json

EXTRA = "anthropic"
"""The field of a message, part, tool or tool call with what has no name in chat completions."""
MARKER = "cache_control"

_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+")
_PARTS = ("image_url", "file")


class Untranslatable:
    """Collects why a request cannot be asked of an upstream that has chat completions alone."""

    def __init__(self) -> None:
        self.first: InvalidRequest | None = None

    def add(self, field: str, what: str) -> None:
        """Note that `what`, the value of `field`, cannot be asked there."""
        self.first = self.first or InvalidRequest(
            f"'{field}' {what}: an upstream that has chat completions alone cannot do that.", param=field
        )


def objects(value: Any, field: str) -> list[Json]:
    """`value`, a list of objects. Raises InvalidRequest."""
    if not isinstance(value, list):
        raise InvalidRequest(f"'{field}' must be a list.", param=field)
    for at, item in enumerate(value):
        if not isinstance(item, dict):
            raise InvalidRequest(f"'{field}[{at}]' must be an object.", param=f"{field}[{at}]")
    return value


def text_of(fields: Json, name: str, field: str) -> str:
    """The text under `name` of the object that `field` names. Raises InvalidRequest."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"'{field}.{name}' must be a text.", param=f"{field}.{name}")
    return value


def blocks_in(content: Any, field: str) -> list[Json]:
    """The blocks of a content, of which a text is one. No content, and an empty text, is none."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"'{field}' must be a text or a list of blocks.", param=field)
    for at, block in enumerate(objects(content, field)):
        text_of(block, "type", f"{field}[{at}]")
    return content


def left(fields: Json, *used: str) -> Json:
    """The fields that are not used, without null, which counts as absent."""
    return {name: value for name, value in fields.items() if name not in used and value is not None}


def with_extra(part: Json, block: Json, extra: Json) -> Json:
    """`part` with the marker of its block, and with what else the block says."""
    marker = {MARKER: block[MARKER]} if block.get(MARKER) is not None else {}
    return {**part, **marker, **({EXTRA: extra} if extra else {})}


def content_of(parts: Iterable[Json]) -> str | list[Json]:
    """Parts as the content of a message: a text alone is a text."""
    listed = list(parts)
    if not listed:
        return ""
    if len(listed) == 1 and listed[0].keys() == {"type", "text"}:
        return str(listed[0]["text"])
    return listed


def part_of(block: Json, field: str, untranslatable: Untranslatable) -> Json:
    """A block of a user, a system prompt or a tool's result as a part. Raises InvalidRequest."""
    kind = block["type"]
    if kind == "text":
        text = text_of(block, "text", field)
        return with_extra({"type": "text", "text": text}, block, left(block, "type", "text", MARKER))
    if kind in _PARTS:
        message = f"'{field}.type' is {kind!r}, which Messages call 'image' or 'document'."
        raise InvalidRequest(message, param=f"{field}.type")
    part = None
    if kind in ("image", "document"):
        source = block.get("source")
        if not isinstance(source, dict):
            raise InvalidRequest(f"'{field}.source' must be an object.", param=f"{field}.source")
        part = (_image if kind == "image" else _document)(block, source, f"{field}.source")
    if part is None:
        untranslatable.add(f"{field}.type", _described(block))
        return block
    return part


def _described(block: Json) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    return f"is {block['type']!r}" + (f" with a source of type {str(kind)!r}" if kind else "")


def _image(block: Json, source: Json, field: str) -> Json | None:
    address = _address(source, field)
    if address is None:
        return None
    url, rest = address
    extra = left(block, "type", "source", MARKER) | ({"source": rest} if rest else {})
    return with_extra({"type": "image_url", "image_url": {"url": url}}, block, extra)


def _document(block: Json, source: Json, field: str) -> Json | None:
    address = _address(source, field)
    title = block.get("title")
    if address is not None:
        data, rest = address
        file = {"filename": title if isinstance(title, str) and title else "document.pdf", "file_data": data}
        extra = left(block, "type", "source", MARKER) | ({"source": rest} if rest else {})
        return with_extra({"type": "file", "file": file}, block, extra)
    name = "data" if source.get("type") == "text" else "content"
    if source.get("type") not in ("text", "content") or not isinstance(source.get(name), str):
        return None
    # The model reads the title and the context as well; `extra` says where the text itself begins.
    said = [text for text in (title, block.get("context"), source[name]) if isinstance(text, str)]
    extra = left(block, "source", MARKER) | {"source": left(source, name)}
    return with_extra({"type": "text", "text": "\n\n".join(said)}, block, extra)


def _address(source: Json, field: str) -> tuple[str, Json] | None:
    """Where a file is, as a URL, and what else its source says; None for a source of another kind."""
    if source.get("type") == "url":
        return text_of(source, "url", field), left(source, "type", "url")
    if source.get("type") != "base64":
        return None
    media_type = text_of(source, "media_type", field)
    if not _MEDIA_TYPE.fullmatch(media_type):
        raise InvalidRequest(f"'{field}.media_type' must be one such as 'image/png'.", param=f"{field}.media_type")
    return f"data:{media_type};base64,{text_of(source, 'data', field)}", left(source, "type", "media_type", "data")
