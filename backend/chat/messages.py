"""Messages of a conversation in the form that chat templates take."""

from __future__ import annotations

from typing import Any

import msgspec

from backend.errors import InvalidRequest
from backend.protocol import Message


def template_message(message: Message, where: str, template: str) -> dict[str, Any]:
    """A message with its content as one text; the role 'developer' becomes 'system'.

    Args:
        where: the message's path in the request.
        template: source of the chat template; a field that it does not use is refused.

    Raises:
        InvalidRequest: a field is wrong or the template has no place for it; names its path.
    """
    role = "system" if message.role == "developer" else message.role
    for field in ("tool_calls", "function_call", "audio", "refusal", "annotations"):
        if getattr(message, field) and not (field == "tool_calls" and field in template):
            raise InvalidRequest(f"{where}.{field}: this model's chat template does not use it", f"{where}.{field}")
    if message.tool_calls and role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls: only the assistant calls tools", f"{where}.tool_calls")
    if role == "tool" and not message.tool_call_id:
        at = f"{where}.tool_call_id"
        raise InvalidRequest(f"{at}: expected the id of the tool call that this message answers", at)
    if role != "tool" and message.tool_call_id is not None:
        at = f"{where}.tool_call_id"
        raise InvalidRequest(f"{at}: only in messages whose role is 'tool'", at)
    result: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        if ".name" not in template and "['name']" not in template:
            raise InvalidRequest(f"{where}.name: this model's chat template does not use it", f"{where}.name")
        result["name"] = message.name
    if message.tool_calls:
        result["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    if message.tool_call_id is not None:
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
        parsed = msgspec.json.decode(arguments or "{}") if isinstance(arguments, str) else arguments
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        at = f"{where}.function.arguments"
        raise InvalidRequest(f"{at}: expected the text of a JSON object", at)
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": parsed}}


def _content(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"{where}.content: expected a text or a list of text parts", f"{where}.content")
        return ""
    texts = []
    for index, part in enumerate(content):
        at = f"{where}.content[{index}]"
        if part.get("type") != "text":
            raise InvalidRequest(f"{at}.type: only parts of type 'text' are supported", f"{at}.type")
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{at}.text: expected a string", f"{at}.text")
        if unknown := [name for name, value in part.items() if name not in ("type", "text") and value is not None]:
            raise InvalidRequest(f"{at}: unknown field in a text part", f"{at}.{unknown[0][:64]}")
        texts.append(text)
    return "\n".join(texts)
