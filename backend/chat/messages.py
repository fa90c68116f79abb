"""Messages of a conversation in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from backend.chat.chat_template import ChatTemplate
from backend.errors import InvalidRequest
from backend.protocol import Message

_TEXT_PARTS = ("text", "input_text", "output_text")
_ROLES = {"developer": "system", "function": "tool"}


def template_messages(
    messages: Sequence[Message], template: ChatTemplate, drop_images: bool = False
) -> list[dict[str, Any]]:
    """The messages with their contents as texts, in roles that the template has.

    'developer' becomes 'system', and 'function' becomes 'tool'. Fields that the template does not read are left out.

    Args:
        drop_images: whether parts that are not text are left out; else they are an error.

    Raises:
        InvalidRequest: a field is wrong; names its path.
    """
    plain = [_plain(message, f"messages[{i}]", template, drop_images) for i, message in enumerate(messages)]
    if template.takes_system or not plain or plain[0]["role"] != "system":
        return plain
    return system_as_user(plain)


def system_as_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation without its system message, whose text opens the first message of the user."""
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


def _plain(message: Message, where: str, template: ChatTemplate, drop_images: bool) -> dict[str, Any]:
    result: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role),
        "content": _content(message, where, drop_images),
    }
    source = template.source
    if message.name is not None and (".name" in source or "['name']" in source):
        result["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning and "reasoning_content" in source:
        result["reasoning_content"] = reasoning
    calls = message.tool_calls or ([{"function": message.function_call}] if message.function_call else [])
    if calls:
        if message.role != "assistant":
            raise InvalidRequest(f"{where}.tool_calls: only the assistant calls tools", f"{where}.tool_calls")
        result["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if message.tool_call_id is not None and result["role"] == "tool":
        result["tool_call_id"] = message.tool_call_id
    return result


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, not as JSON text."""
    function = call.get("function")
    if call.get("type") not in (None, "function"):
        raise InvalidRequest(f"{where}.type: expected 'function'", f"{where}.type")
    if not isinstance(call.get("id"), str | None):
        raise InvalidRequest(f"{where}.id: expected a string", f"{where}.id")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function: expected an object with 'name' and 'arguments'", f"{where}.function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"{where}.function.name: expected a name", f"{where}.function.name")
    arguments = function.get("arguments")
    try:
        # msgspec refuses NaN and unpaired surrogates, which no tokenizer accepts. Some clients send an empty text for
        # a call without arguments.
        parsed = msgspec.json.decode(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        at = f"{where}.function.arguments"
        raise InvalidRequest(f"{at}: expected the text of a JSON object", at)
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": parsed}}


def _content(message: Message, where: str, drop_images: bool) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role in ("assistant", "tool", "function"):
            return message.refusal or ""
        raise InvalidRequest(f"{where}.content: expected a text or a list of text parts", f"{where}.content")
    texts = []
    for index, part in enumerate(content):
        at = f"{where}.content[{index}]"
        kind = part.get("type")
        if kind in _TEXT_PARTS or kind == "refusal":
            text = part.get("refusal" if kind == "refusal" else "text")
            if not isinstance(text, str):
                raise InvalidRequest(f"{at}.text: expected a string", f"{at}.text")
            texts.append(text)
        elif not isinstance(kind, str):
            raise InvalidRequest(f"{at}.type: expected 'text'", f"{at}.type")
        elif not drop_images:
            raise InvalidRequest(
                f"{at}.type: this model reads text only; leave the part out, or start the server with --drop-images",
                f"{at}.type",
            )
    return "\n".join(texts)
