"""The fields ``tools`` and ``tool_choice``: the functions that the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.errors import InvalidRequest

_MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """One function that the model may call."""

    name: str
    schema: dict[str, Any]
    """JSON schema of its arguments."""
    strict: bool
    """Whether a schema that is not supported is an error."""
    field: str
    """Path of its schema in the request."""


@dataclass(frozen=True)
class ToolChoice:
    """The tools that one answer may call; at least one."""

    tools: tuple[Tool, ...]
    required: bool
    """Whether the answer must be a call."""


def read_tools(tools: Sequence[Any] | None, choice: str | dict[str, Any] | None) -> ToolChoice | None:
    """Checks both fields; None: no tool may be called.

    Raises:
        InvalidRequest: names the field.
    """
    declared = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]
    if len(declared) > _MAX_TOOLS:
        raise InvalidRequest(f"tools: {len(declared)} tools, expected at most {_MAX_TOOLS}", "tools")
    names = [tool.name for tool in declared]
    if duplicates := [name for name in names if names.count(name) > 1]:
        index = len(names) - 1 - names[::-1].index(duplicates[0])
        raise InvalidRequest(f"tools[{index}].function.name: duplicate", f"tools[{index}].function.name")
    match choice:
        case None | "auto" | "none" if not declared:
            return None
        case "none":
            return None
        case None | "auto":
            return ToolChoice(tuple(declared), required=False)
        case "required" if declared:
            return ToolChoice(tuple(declared), required=True)
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not more and not others:
            named = tuple(tool for tool in declared if tool.name == name)
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
