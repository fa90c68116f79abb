"""Tools and the choice of a tool, which chat completions nest one level deeper."""

from typing import Any

from gateway.errors import InvalidRequest
from gateway.surfaces.surface import Json

_NESTED = ("function", "custom")
_NAMESPACE = "namespace"
_SEPARATOR = "__"


def chat_tools(tools: Any) -> list[Json]:
    """The tools as chat completions have them; the functions of a namespace each by itself, under a longer name.

    A tool of another kind, which a provider runs itself, stays as it is. Raises InvalidRequest.
    """
    if not isinstance(tools, list):
        raise InvalidRequest("'tools' must be a list of tools.", param="tools")
    return [read for number, tool in enumerate(tools) for read in _chat_tools(tool, f"tools[{number}]")]


def _chat_tools(tool: Any, param: str) -> list[Json]:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise InvalidRequest(f"'{param}' must be an object with a 'type', such as \"function\".", param=param)
    if tool["type"] not in (*_NESTED, _NAMESPACE):
        return [tool]
    if not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"'{param}.name' must be the tool's name.", param=f"{param}.name")
    if tool["type"] != _NAMESPACE:
        return [_nested_tool(tool)]
    inner = tool.get("tools")
    if not isinstance(inner, list):
        raise InvalidRequest(f"'{param}.tools' must be a list of tools.", param=f"{param}.tools")
    read = [each for number, item in enumerate(inner) for each in _chat_tools(item, f"{param}.tools[{number}]")]
    return [_in_namespace(each, tool) for each in read]


def _in_namespace(read: Json, namespace: Json) -> Json:
    """A tool of a namespace. Of the namespace, its tools keep what they do not say themselves."""
    rest = {name: value for name, value in namespace.items() if name not in ("type", "name", "tools", "description")}
    kind = read["type"]
    if kind not in _NESTED:
        return {**read, _NAMESPACE: namespace["name"], **rest}
    about = namespace.get("description")
    described = [text for text in (about, read[kind].get("description")) if isinstance(text, str) and text]
    named = {**read[kind], "name": qualified(namespace["name"], read[kind]["name"])}
    return {**read, **rest, kind: {**named, "description": "\n".join(described)} if described else named}


def qualified(namespace: str, name: str) -> str:
    """The one name in chat completions of a function in a namespace."""
    return f"{namespace}{_SEPARATOR}{name}"


def unqualified(name: str, tools: Any) -> tuple[str | None, str]:
    """The namespace, if any, and the name of a function that is called, by the tools of the request."""
    for tool in tools if isinstance(tools, list) else ():
        is_namespace = isinstance(tool, dict) and tool.get("type") == _NAMESPACE and isinstance(tool.get("name"), str)
        if is_namespace and name.startswith(prefix := qualified(tool["name"], "")):
            inner = name.removeprefix(prefix)
            if any(isinstance(each, dict) and each.get("name") == inner for each in tool.get("tools") or ()):
                return tool["name"], inner
    return None, name


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
