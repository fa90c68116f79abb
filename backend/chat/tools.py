"""``tools`` and ``tool_choice``: which functions the model may call, and whether it must."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.errors import InvalidRequest

_MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """One function that the model may call."""

    name: str
    schema: dict[str, Any]
    """JSON schema of its arguments."""
    strict: bool
    """Whether a schema that cannot be followed to the letter is an error."""
    field: str
    """Where its schema stands in the request."""


@dataclass(frozen=True)
class ToolChoice:
    """The tools of one answer, never empty."""

    tools: tuple[Tool, ...]
    required: bool
    """The answer has to be a call."""


def read_tools(tools: Sequence[Any] | None, choice: str | dict[str, Any] | None) -> ToolChoice | None:
    """Checks both fields against each other; None: nothing can be called.

    Raises:
        InvalidRequest: names the field.
    """
    known = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]
    if len(known) > _MOST_TOOLS:
        raise InvalidRequest(f"tools: {len(known)} tools, expected at most {_MOST_TOOLS}", "tools")
    names = [tool.name for tool in known]
    if twice := [name for name in names if names.count(name) > 1]:
        index = len(names) - 1 - names[::-1].index(twice[0])
        raise InvalidRequest(f"tools[{index}].function.name: given twice", f"tools[{index}].function.name")
    match choice:
        case None | "auto" | "none" if not known:
            return None
        case "none":
            return None
        case None | "auto":
            return ToolChoice(tuple(known), required=False)
        case "required" if known:
            return ToolChoice(tuple(known), required=True)
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not more and not others:
            named = tuple(tool for tool in known if tool.name == name)
            if not named:
                raise InvalidRequest("tool_choice.function.name: no such tool in tools", "tool_choice.function.name")
            return ToolChoice(named, required=True)
        case "required":
            raise InvalidRequest("tool_choice: 'required' needs tools", "tool_choice")
    raise InvalidRequest(
        "tool_choice: expected 'none', 'auto', 'required', or "
        '{"type": "function", "function": {"name": one of the tools}}',
        "tool_choice",
    )


def _tool(value: Any, where: str) -> Tool:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: expected an object", where)
    if value.get("type") != "function":
        raise InvalidRequest(f"{where}.type: expected 'function'", f"{where}.type")
    if unknown := [name for name in value if name not in ("type", "function")]:
        raise InvalidRequest(f"{where}.{unknown[0][:64]}: unknown field", f"{where}.{unknown[0][:64]}")
    function, at = value.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise InvalidRequest(f"{at}: expected an object with 'name' and 'parameters'", at)
    if unknown := [name for name in function if name not in ("name", "description", "parameters", "strict")]:
        raise InvalidRequest(f"{at}.{unknown[0][:64]}: unknown field", f"{at}.{unknown[0][:64]}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{at}.name: expected 1 to 64 letters, digits, '_', '-' or '.'", f"{at}.name")
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{at}.description: expected a string", f"{at}.description")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"{at}.strict: expected true or false", f"{at}.strict")
    parameters = function.get("parameters")
    if parameters is None:
        # No parameters: the arguments are an empty object.
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"{at}.parameters: expected a JSON schema, which is an object", f"{at}.parameters")
    if not parameters:
        parameters = {"type": "object"}
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{at}.parameters.type: expected 'object'", f"{at}.parameters.type")
    return Tool(name, {"type": "object", **parameters}, bool(function.get("strict")), f"{at}.parameters")
