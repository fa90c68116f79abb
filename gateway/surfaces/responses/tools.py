"""Tools and the choice of a tool, which chat completions nest one level deeper."""

from typing import Any

from gateway.errors import InvalidRequest
from gateway.surfaces.surface import Json

_NESTED = ("function", "custom")


def chat_tools(tools: Any) -> tuple[list[Json], InvalidRequest | None]:
    """The tools as chat completions have them, and the error about the first that they do not have.

    A tool of another kind stays as it is. Raises InvalidRequest.
    """
    if not isinstance(tools, list):
        raise InvalidRequest("'tools' must be a list of tools.", param="tools")
    read: list[Json] = []
    refused: InvalidRequest | None = None
    for number, tool in enumerate(tools):
        param = f"tools[{number}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise InvalidRequest(f"'{param}' must be an object with a 'type', such as \"function\".", param=param)
        if tool["type"] not in _NESTED:
            refused = refused or not_in_chat(f"{param}.type", f"the built-in tool {tool['type'][:50]!r}")
            read.append(tool)
            continue
        if not isinstance(tool.get("name"), str):
            raise InvalidRequest(f"'{param}.name' must be the tool's name.", param=f"{param}.name")
        read.append(_nested_tool(tool))
    return read, refused


def chat_tool_choice(choice: Any) -> tuple[Any, InvalidRequest | None]:
    """The same for `tool_choice`."""
    if isinstance(choice, str):
        return choice, None
    if not isinstance(choice, dict):
        raise InvalidRequest(
            '\'tool_choice\' must be "auto", "none", "required" or an object that names a tool.',
            param="tool_choice",
        )
    kind = choice.get("type")
    if kind in _NESTED and isinstance(choice.get("name"), str):
        return _nested(choice), None
    if kind == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
        if all(isinstance(tool, dict) and tool.get("type") in _NESTED for tool in tools):
            return _nested({**choice, "tools": [_nested(tool) for tool in tools]}), None
        return choice, not_in_chat("tool_choice.tools", "a choice of built-in tools")
    return choice, not_in_chat("tool_choice", f"the choice of the tool {str(kind)[:50]!r}")


def not_in_chat(param: str, what: str) -> InvalidRequest:
    """The error for what an upstream that has only chat completions cannot be asked."""
    return InvalidRequest(
        f"'{param}': {what} has no form in chat completions, and no upstream of this model has the Responses API.",
        param=param,
    )


def _nested(tool: Json) -> Json:
    kind = tool["type"]
    return {"type": kind, kind: {name: value for name, value in tool.items() if name != "type" and value is not None}}


def _nested_tool(tool: Json) -> Json:
    """A tool; the grammar of a custom one is nested too."""
    form = tool.get("format")
    if tool["type"] == "custom" and isinstance(form, dict) and form.get("type") == "grammar":
        return _nested({**tool, "format": _nested(form)})
    return _nested(tool)
