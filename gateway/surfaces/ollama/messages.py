"""The messages of a chat, as those of chat completions.

- Images are parts after the text, as data URLs. Their media type is read from their first bytes; what is not known is
  sent as PNG.
- Ollama's tool calls need no ids. A call without one gets `call_0`, `call_1` and so on, numbered over the conversation.
- The result of a call belongs to the last message with calls: to the first of them that has no result yet and the name
  that the result has (`tool_name`, or `name`). If it has no name, or none of these, it belongs to the first without a
  result. `tool_name` is left out where the id of the call says as much.
"""

import binascii
import json
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

from gateway.errors import InvalidRequest
from gateway.surfaces.surface import Json

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_HEAD = 24
"""Characters of an image that are decoded to recognise it."""
_MAGIC = (
    (re.compile(rb"\xff\xd8\xff"), "jpeg"),
    (re.compile(rb"GIF8"), "gif"),
    (re.compile(rb"RIFF.{4}WEBP", re.DOTALL), "webp"),
    (re.compile(rb"BM"), "bmp"),
)


def chat_messages(given: Any) -> list[Json]:
    """The messages. Raises InvalidRequest, naming the field."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise _invalid("messages", 'a list such as [{"role": "user", "content": "Hello"}]')
    for position, message in enumerate(given):
        if not isinstance(message, dict):
            raise _invalid(f"messages[{position}]", "an object with 'role' and 'content'")
    ids = _new_ids(given)
    calls: list[Json] = []
    messages = []
    for position, message in enumerate(given):
        translated = _message(message, f"messages[{position}]", ids)
        if "tool_calls" in translated:
            calls = list(translated["tool_calls"])
        if translated["role"] == "tool":
            _assign(translated, calls)
        messages.append(translated)
    return messages


def content_of(text: str, images: Any, field: str) -> str | list[Json]:
    """A text and the images of the field of that name. Raises InvalidRequest."""
    if images is not None and not isinstance(images, list):
        raise _invalid(field, "a list of images in base64")
    parts: list[Json] = [{"type": "text", "text": text}] if text else []
    for position, image in enumerate(images or ()):
        url = f"data:image/{_image_type(image, f'{field}[{position}]')};base64,{image}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts if images else text


def arguments_text(arguments: Json) -> str:
    """The arguments of a call as chat completions have them. Raises RecursionError for what is nested too deep."""
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))


def _message(given: Json, field: str, ids: Iterator[str]) -> Json:
    role, content, thinking = given.get("role"), given.get("content"), given.get("thinking")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{field}.role", 'the role of the message, such as "user"')
    if content is not None and not isinstance(content, str):
        raise _invalid(f"{field}.content", "text; images are in 'images'")
    if thinking is not None and not isinstance(thinking, str):
        raise _invalid(f"{field}.thinking", "text")
    if given.get("reasoning_content") is not None:
        raise InvalidRequest(
            f"'{field}.reasoning_content' is called 'thinking' in this API.", param=f"{field}.reasoning_content"
        )
    images, calls = given.get("images"), given.get("tool_calls")
    read = ("role", "content", "thinking", "images", "tool_calls")
    message = {name: value for name, value in given.items() if value is not None and name not in read}
    message["role"] = role.lower()  # as Ollama reads it
    if content is not None or images not in (None, []):
        message["content"] = content_of(content or "", images, f"{field}.images")
    if thinking:
        message["reasoning_content"] = thinking
    if calls is not None and not isinstance(calls, list):
        raise _invalid(f"{field}.tool_calls", "a list of tool calls")
    if calls:
        message["tool_calls"] = [
            _call(call, f"{field}.tool_calls[{position}]", position, ids) for position, call in enumerate(calls)
        ]
    return message


def _call(given: Any, field: str, position: int, ids: Iterator[str]) -> Json:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise _invalid(field, 'an object such as {"function": {"name": "f", "arguments": {}}}')
    name, arguments, identifier = function.get("name"), function.get("arguments"), given.get("id")
    if not isinstance(name, str):
        raise _invalid(f"{field}.function.name", "the name of the tool")
    if arguments is not None and not isinstance(arguments, dict):
        raise _invalid(f"{field}.function.arguments", "an object")
    if identifier is not None and not isinstance(identifier, str):
        raise _invalid(f"{field}.id", "text")
    try:
        text = arguments_text(arguments or {})
    except RecursionError as error:
        raise InvalidRequest(f"'{field}.function.arguments' is nested too deeply.", param=field) from error
    # Ollama numbers the calls of a message; the place in the list says the same.
    rest = {key: value for key, value in function.items() if value is not None and (key, value) != ("index", position)}
    call = {key: value for key, value in given.items() if value is not None}
    return {
        "type": "function",
        **call,
        "id": identifier or next(ids),
        "function": {**rest, "name": name, "arguments": text},
    }


def _new_ids(messages: list[Json]) -> Iterator[str]:
    """Ids in order, without those that a client has given."""
    calls = [
        call for message in messages if isinstance(message.get("tool_calls"), list) for call in message["tool_calls"]
    ]
    given = {call["id"] for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str)}
    return (identifier for number in count() if (identifier := f"call_{number}") not in given)


def _assign(result: Json, calls: list[Json]) -> None:
    """Give a result the id of its call, and take the call from those without a result."""
    identifier, name = result.get("tool_call_id"), result.get("tool_name", result.get("name"))
    if identifier is None:
        call = next((call for call in calls if call["function"]["name"] == name), calls[0] if calls else None)
    else:
        call = next((call for call in calls if call["id"] == identifier), None)
    if call is None:
        return
    calls.remove(call)
    result["tool_call_id"] = call["id"]
    if result.get("tool_name") == call["function"]["name"]:
        del result["tool_name"]


def _image_type(image: Any, field: str) -> str:
    head = image[:_HEAD].strip() if isinstance(image, str) else ""
    if not _BASE64.fullmatch(head):
        raise _invalid(field, "the bytes of the image in base64, not an address and without 'data:'")
    first = binascii.a2b_base64(head[: len(head) // 4 * 4])
    return next((name for magic, name in _MAGIC if magic.match(first)), "png")


def _invalid(field: str, right: str) -> InvalidRequest:
    return InvalidRequest(f"'{field}' must be {right}.", param=field)
