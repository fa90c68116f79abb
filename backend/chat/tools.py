"""The fields ``tools`` and ``tool_choice``: the functions that the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.errors import InvalidRequest

_MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION_FIELDS = ("name", "description", "parameters")
# Keywords of JSON schema that constrain nothing.
_ANNOTATIONS = frozenset({"description", "title", "examples", "default", "$comment", "$schema", "markdownDescription"})
_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")
_MAX_SHORT_DESCRIPTION = 120


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
    listed: tuple[dict[str, Any], ...]
    """All functions of the request, for the prompt, in OpenAI's form."""
    named: bool = False
    """Whether the request names the tool: then the answer is one call."""


def read_tools(tools: Sequence[Any] | None, choice: str | dict[str, Any] | None) -> ToolChoice | None:
    """Checks both fields; None: no tool may be called. Tools that a provider runs itself are left out.

    Raises:
        InvalidRequest: names the field.
    """
    functions = {index: tool for index, tool in enumerate(tools or []) if not _is_hosted(tool)}
    declared = [_tool(tool, f"tools[{index}]") for index, tool in functions.items()]
    listed = tuple({"type": "function", "function": _described(tool["function"])} for tool in functions.values())
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
            return ToolChoice(tuple(declared), False, listed)
        case "required" if declared:
            return ToolChoice(tuple(declared), True, listed)
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not more and not others:
            named = tuple(tool for tool in declared if tool.name == name)
            if not named:
                raise InvalidRequest("tool_choice.function.name: no such tool in tools", "tool_choice.function.name")
            return ToolChoice(named, True, listed, named=True)
        case "required":
            raise InvalidRequest("tool_choice: 'required' needs tools", "tool_choice")
    raise InvalidRequest(
        "tool_choice: expected 'none', 'auto', 'required', or "
        '{"type": "function", "function": {"name": one of the tools}}',
        "tool_choice",
    )


def hosted_tools(tools: Sequence[Any] | None) -> list[str]:
    """The fields of tools that a provider would run itself, such as a web search. There are none here."""
    return [f"tools[{index}]" for index, tool in enumerate(tools or []) if _is_hosted(tool)]


def shortened(tools: Sequence[dict[str, Any]], level: int) -> list[dict[str, Any]]:
    """The tools in fewer tokens. The grammar of their calls is not concerned.

    Args:
        level: 0 is unchanged; 1 leaves out what only describes parameters, and all but the first sentence of a
            function's description; 2 leaves the names and types of the parameters.
    """
    if level == 0:
        return list(tools)
    return [{"type": "function", "function": _shortened(tool["function"], level)} for tool in tools]


def _shortened(function: dict[str, Any], level: int) -> dict[str, Any]:
    short = {"name": function["name"]}
    if level == 1 and (description := function.get("description")):
        short["description"] = _SENTENCE_END.split(description, maxsplit=1)[0][:_MAX_SHORT_DESCRIPTION]
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties")
    if level == 1:
        short["parameters"] = _without_descriptions(parameters)
    elif isinstance(properties, dict):
        short["parameters"] = {
            name: value.get("type", "any") if isinstance(value, dict) else "any" for name, value in properties.items()
        }
    return short


def _without_descriptions(schema: Any, of_names: bool = False) -> Any:
    """A JSON schema without its annotations. Under ``properties`` a key is the name of a parameter."""
    if isinstance(schema, list):
        return [_without_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_descriptions(value, name in ("properties", "$defs", "definitions") and not of_names)
        for name, value in schema.items()
        if of_names or name not in _ANNOTATIONS
    }


def _described(function: dict[str, Any]) -> dict[str, Any]:
    """What a chat template reads of a function: no field that is for the server, and none that is null."""
    return {name: value for name, value in function.items() if name in _FUNCTION_FIELDS and value is not None}


def _is_hosted(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] not in ("function", "custom")


def _tool(value: Any, where: str) -> Tool:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: expected an object", where)
    if value.get("type") != "function":
        raise InvalidRequest(f"{where}.type: expected 'function'", f"{where}.type")
    function, at = value.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise InvalidRequest(f"{at}: expected an object with 'name' and 'parameters'", at)
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
