"""The tools of a request, and which of them the model may call."""

from typing import Any

from gateway.errors import InvalidRequest
from gateway.surfaces.messages.content import MARKER, left, objects, text_of, with_extra
from gateway.surfaces.surface import Json

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: Any) -> list[Json]:
    """The client's own tools as functions, and those that Anthropic defines as they are. Raises InvalidRequest."""
    return [_chat_tool(tool, f"tools[{at}]") for at, tool in enumerate(objects(tools, "tools"))]


def _chat_tool(tool: Json, field: str) -> Json:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        if not isinstance(kind, str) or kind == "function":
            expected = f"'{field}.type' must be 'custom', or the type of a tool that Anthropic defines."
            raise InvalidRequest(expected, param=f"{field}.type")
        return tool
    function: Json = {"name": text_of(tool, "name", field)}
    for name, chat_name in (("description",) * 2, ("input_schema", "parameters"), ("strict",) * 2):
        if tool.get(name) is not None:
            function[chat_name] = tool[name]
    rest = left(tool, "type", "name", "description", "input_schema", "strict", MARKER)
    return with_extra({"type": "function", "function": function}, tool, rest)


def chat_tool_choice(choice: Any) -> Json:
    """`tool_choice` and, where it is forbidden to call several tools at once, `parallel_tool_calls`."""
    if not isinstance(choice, dict):
        raise InvalidRequest('\'tool_choice\' must be an object such as {"type": "auto"}.', param="tool_choice")
    kind, alone = choice.get("type"), choice.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        name = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequest(f"'{name}' must be true or false.", param=name)
    used = ["type", "disable_parallel_tool_use"]
    if kind == "tool":
        used.append("name")
        function = {"name": text_of(choice, "name", "tool_choice")}
        made: Json = {"tool_choice": {"type": "function", "function": function}}
    elif isinstance(kind, str) and kind in _CHOICES:
        made = {"tool_choice": _CHOICES[kind]}
    else:
        raise InvalidRequest("'tool_choice.type' must be 'auto', 'any', 'tool' or 'none'.", param="tool_choice.type")
    if unknown := left(choice, *used):
        name = f"tool_choice.{next(iter(unknown))}"
        raise InvalidRequest(f"'{name}' is no field of a choice of type {kind!r}.", param=name)
    return {**made, "parallel_tool_calls": False} if alone else made
