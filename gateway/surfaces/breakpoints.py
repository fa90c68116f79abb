"""Breakpoints for prompt caching (Anthropic's `cache_control`) in the fields of a chat request."""

from typing import Any

from gateway.surfaces.surface import Json

CACHE_CONTROL = "cache_control"


def without_breakpoints(fields: Json) -> Json:
    """The fields without breakpoints on messages, content parts, tools and their calls.

    These are the places where they mean something. A content of one part of text becomes text.
    """
    cleared = dict(fields)
    for name, clear in (("messages", _message), ("tools", _tool)):
        if isinstance(cleared.get(name), list):
            cleared[name] = [clear(item) for item in cleared[name]]
    return cleared


def _message(message: Any) -> Any:
    message = _unmarked(message)
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        message["content"] = _content([_unmarked(part) for part in message["content"]])
    if isinstance(message, dict) and isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool(call) for call in message["tool_calls"]]
    return message


def _content(parts: list[Any]) -> Any:
    is_text = len(parts) == 1 and isinstance(parts[0], dict) and set(parts[0]) == {"type", "text"}
    return parts[0]["text"] if is_text else parts


def _tool(tool: Any) -> Any:
    tool = _unmarked(tool)
    if isinstance(tool, dict) and "function" in tool:
        tool["function"] = _unmarked(tool["function"])
    return tool


def _unmarked(value: Any) -> Any:
    """A copy without the marker, if it is an object."""
    return {name: item for name, item in value.items() if name != CACHE_CONTROL} if isinstance(value, dict) else value
