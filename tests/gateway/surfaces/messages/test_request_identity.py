"""Two requests have the same fields only if they ask the same, and any body is read or refused."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.surfaces.messages.assistant_turn import blocks_of
from gateway.surfaces.messages.surface import MessagesSurface

Json = dict[str, Any]

SURFACE = MessagesSurface()

# Few values, so that two requests are often almost the same.
words = st.sampled_from(["", "a", "b", "a\n\nb", "{}", '{"a":1}'])
names = st.sampled_from(["a", "b"])
inputs = st.sampled_from([{}, {"a": 1}, {"a": 1.0}, {"a": True}, {"a": None}, {"__raw": "a"}, {"__raw": "{}"}])


def block(kind: str, known: Json, **others: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({"type": st.just(kind), **known}, optional=others)


texts = block(
    "text",
    {"text": words},
    citations=st.sampled_from([None, []]),
    anthropic=st.sampled_from([{"type": "document"}, {"citations": []}]),
    title=words,
)
sources = st.sampled_from(
    [
        {"type": "url", "url": "https://a/b"},
        {"type": "url", "url": "https://a/b", "more": 1},
        {"type": "base64", "media_type": "image/png", "data": "aGk="},
        {"type": "base64", "media_type": "image/png", "data": "aGk=", "media": None},
        {"type": "file", "file_id": "a"},
    ]
)
text_sources = st.sampled_from(
    [
        {"type": "text", "media_type": "text/plain", "data": "b"},
        {"type": "text", "media_type": "text/plain", "data": "a\n\nb"},
        {"type": "content", "content": "b"},
        {"type": "content", "content": [{"type": "text", "text": "b"}]},
    ]
)
images = block("image", {"source": sources}, transformations=st.just({}))
documents = block("document", {"source": sources | text_sources}, title=words, context=words)
searches = block("search_result", {"content": st.just([]), "title": words})
parts = st.one_of(texts, texts, images, documents, searches)
results = block(
    "tool_result",
    {"tool_use_id": names},
    content=words | st.lists(parts, max_size=2),
    is_error=st.sampled_from([True, False, None]),
    toolset_name=words,
)
calls = block("tool_use", {"id": names, "name": names, "input": inputs}, caller=st.just({"type": "direct"}))
thoughts = block("thinking", {"thinking": words}, signature=words) | block("redacted_thinking", {"data": words})
server_calls = block("server_tool_use", {"id": names, "name": names, "input": inputs})


def turn(role: str, *kinds: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    content = words | st.lists(st.one_of(*kinds), max_size=3)
    return st.fixed_dictionaries({"role": st.just(role), "content": content}, optional={"clear_at": words})


turns = st.one_of(
    turn("user", texts, results, images, documents),
    turn("assistant", texts, calls, thoughts, server_calls),
    turn("system", texts),
    turn("ctx", texts, results),
)
tools = st.fixed_dictionaries(
    {"name": names},
    optional={
        "type": st.sampled_from([None, "custom", "bash_20250124"]),
        "description": words,
        "input_schema": st.sampled_from([{}, {"type": "object"}]),
        "strict": st.booleans(),
        "parameters": st.just({}),
        "function": st.just({"name": "a"}),
    },
)
choices = st.fixed_dictionaries(
    {"type": st.sampled_from(["auto", "any", "none"])}, optional={"disable_parallel_tool_use": st.booleans()}
) | st.fixed_dictionaries({"type": st.just("tool"), "name": names})
forms = st.sampled_from([{"type": "json_schema", "schema": {}}, {"type": "json_schema", "schema": {}, "name": "a"}])
requests = st.fixed_dictionaries(
    {"model": names, "max_tokens": st.sampled_from([1, 2]), "messages": st.lists(turns, max_size=3)},
    optional={
        "system": words | st.lists(texts, max_size=2),
        "tools": st.lists(tools, max_size=2),
        "tool_choice": choices,
        "stop_sequences": st.sampled_from([[], ["a"], ["a", "b"]]),
        "metadata": st.sampled_from([{}, {"user_id": None}, {"user_id": "a"}, {"user_id": "a", "b": 1}]),
        "output_config": st.fixed_dictionaries({}, optional={"effort": words, "b": words}),
        "output_format": forms,
        "thinking": st.sampled_from([{"type": "enabled", "budget_tokens": 1}, {"type": "disabled"}]),
        "continue_final_message": st.booleans(),
        "stream": st.booleans(),
        "min_p": st.sampled_from([0, None]),
    },
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place of a JSON value: an object or list, and the name or index in it."""
    here: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        here += [(value, name), *places(item)]
    return here


def without_null(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def block_meaning(block: Json) -> Json:
    block = without_null(block)
    if "source" in block:
        block["source"] = without_null(block["source"])
    if block["type"] == "tool_result":
        block["content"] = content_meaning(block.get("content"))
        if block.get("is_error") is False:
            del block["is_error"]
    return block


def content_meaning(content: Any) -> list[Json]:
    """A text is one block; no text is no block."""
    listed = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    blocks = [block_meaning(block) for block in listed]
    return [] if blocks == [{"type": "text", "text": ""}] else blocks


def turn_meaning(message: Json) -> list[Json]:
    """A turn of the user is its results, each of them alone, and then the rest."""
    message = without_null(message)
    blocks = content_meaning(message.get("content"))
    results = [one for one in blocks if one["type"] == "tool_result"] if message["role"] != "assistant" else []
    rest = [one for one in blocks if one not in results]
    made: list[Json] = [{"role": "user", "content": [result]} for result in results]
    if rest or not results:
        made.append({"role": message["role"], "content": content_meaning(rest)})
    made[-1] |= {name: value for name, value in message.items() if name != "content"}
    return made


def meaning(request: Json) -> str:
    """The request, written in one way of those that ask the same."""
    fields = without_null(request)
    fields.pop("stream", None)
    system = fields.pop("system", [])
    opening = [] if system in ("", []) else [{"role": "system", "content": system}]
    messages = [made for message in (*opening, *fields["messages"]) for made in turn_meaning(message)]
    fields["messages"] = messages
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and any(one["type"] == "text" and one["text"] for one in last["content"]):
        fields.setdefault("continue_final_message", True)
        fields.setdefault("add_generation_prompt", False)
    if "output_format" in fields:
        fields["output_config"] = {**(fields.get("output_config") or {}), "format": fields.pop("output_format")}
    for name in ("tools", "stop_sequences", "metadata", "output_config"):
        value = fields.pop(name, None)
        value = without_null(value) if isinstance(value, dict) else value
        if value:
            fields[name] = value
    for tool in fields.get("tools", ()):
        for name in [name for name, value in tool.items() if value is None or (name, value) == ("type", "custom")]:
            del tool[name]
    choice = fields.get("tool_choice")
    if choice:
        fields["tool_choice"] = without_null(choice)
        if not choice.get("disable_parallel_tool_use"):
            fields["tool_choice"].pop("disable_parallel_tool_use", None)
    return json.dumps(fields, sort_keys=True)


def read(request: Json) -> Json:
    return SURFACE.chat_request("/v1/messages", request).fields


# From the fields back to a request


def block_of(part: Json) -> Json:
    extra = part.get("anthropic", {})
    kept = extra.get("source", {})
    if part["type"] == "text" and extra.get("type") == "document":
        before = [extra[name] for name in ("title", "context") if name in extra]
        text = part["text"][sum(len(text) + 2 for text in before) :]
        return {**extra, "source": {**kept, "data" if kept["type"] == "text" else "content": text}}
    if part["type"] == "image_url":
        return {**extra, "type": "image", "source": source_of(part["image_url"]["url"]) | kept}
    if part["type"] == "file":
        return {**extra, "type": "document", "source": source_of(part["file"]["file_data"]) | kept}
    return {**extra, **{name: value for name, value in part.items() if name != "anthropic"}}


def source_of(url: str) -> Json:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    media_type, data = url.removeprefix("data:").split(";base64,")
    return {"type": "base64", "media_type": media_type, "data": data}


def content_in(content: str | list[Json]) -> Any:
    return content if isinstance(content, str) else [block_of(part) for part in content]


def turn_of(message: Json) -> Json:
    extra = message.get("anthropic", {})
    said = {"role": message["role"], **extra.get("message", {})}
    if message["role"] == "assistant":
        return {**said, "content": blocks_of(message)}
    if message["role"] != "tool":
        return {**said, "content": content_in(message["content"])}
    result = {"tool_use_id": message["tool_call_id"], "content": content_in(message["content"])}
    result |= {"is_error": message["is_error"]} if "is_error" in message else {}
    return {
        **said,
        "role": extra.get("message", {}).get("role", "user"),
        "content": [{"type": "tool_result", **extra.get("tool_result", {}), **result}],
    }


def tool_of(tool: Json) -> Json:
    if tool["type"] != "function":
        return tool
    function = dict(tool["function"])
    schema = {"input_schema": function.pop("parameters")} if "parameters" in function else {}
    return {**function, **schema, **tool.get("anthropic", {})}


def request_of(fields: Json) -> Json:
    """A request for a message that asks what the fields ask."""
    made = {**fields, "messages": [turn_of(message) for message in fields["messages"]]}
    made["tools"] = [tool_of(tool) for tool in made.pop("tools", [])]
    if "tool_choice" in made:
        choice = made.pop("tool_choice")
        names = {"auto": "auto", "required": "any", "none": "none"}
        named = {"type": names[choice]} if isinstance(choice, str) else {"type": "tool", **choice["function"]}
        made["tool_choice"] = named | (
            {} if made.pop("parallel_tool_calls", True) else {"disable_parallel_tool_use": True}
        )
    made["stop_sequences"] = made.pop("stop", [])
    made["metadata"] = {**made.pop("metadata", {}), "user_id": made.pop("user", None)}
    made["output_config"] = {**made.pop("output_config", {}), "effort": made.pop("reasoning_effort", None)}
    if "response_format" in made:
        schema = made.pop("response_format")["json_schema"]
        form = {"type": "json_schema", "schema": schema["schema"], **schema.get("anthropic", {})}
        made["output_config"]["format"] = form
    return made


@given(requests)
@settings(max_examples=300, deadline=None)
def test_the_fields_say_all_that_the_request_asks(request: Json) -> None:
    """A request can be read back from its fields, so two that ask different things never share an answer."""
    before = json.dumps(request)
    fields = read(request)
    assert json.dumps(request) == before, "the request was changed"
    assert meaning(request_of(fields)) == meaning(request)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "source", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(requests, st.data())
@settings(max_examples=300, deadline=None)
def test_any_body_is_read_or_refused(request: Json, data: st.DataObject) -> None:
    """A wrong value in any place is refused with a message, or goes to the upstream."""
    request = json.loads(json.dumps(request))
    container, name = data.draw(st.sampled_from(places(request)))
    container[name] = data.draw(anything)
    with contextlib.suppress(InvalidRequest):
        SURFACE.chat_request("/v1/messages", request)


@pytest.mark.parametrize("name", ["system", "messages", "tools", "metadata", "thinking"])
def test_a_deep_body_is_read_or_refused(name: str) -> None:
    """Values that are nested deeper than the interpreter can walk are no fault of the gateway."""
    deep: Any = {}
    for _ in range(5000):
        deep = {"type": "text", "text": "", "role": "user", "name": "f", "content": [deep]}
    call = {"type": "tool_use", "id": "", "name": "", "input": deep}
    fields = {"model": "m", "max_tokens": 1, "messages": [{"role": "assistant", "content": [call]}]}
    with pytest.raises(InvalidRequest):
        read(fields)
    fields |= {"messages": [], name: [deep] if name in ("system", "messages", "tools") else deep}
    assert read(fields)["max_tokens"] == 1
