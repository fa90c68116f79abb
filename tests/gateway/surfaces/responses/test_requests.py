"""Requests of the Responses API as chat completions: one conversation, one request, in whichever form it comes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.entries.key import request_key
from cache.errors import UnstorableAnswer
from gateway.errors import InvalidRequest
from gateway.surfaces.responses.answers import chat_answer, own_answer
from gateway.surfaces.responses.input_items import input_list
from gateway.surfaces.responses.requests import continued
from gateway.surfaces.surface import ChatRequest
from tests.gateway.surfaces.responses.examples import PATH, SURFACE, asked, copied, texts, tidy_chats, values

Json = dict[str, Any]


def read(fields: Json) -> ChatRequest:
    return SURFACE.chat_request(PATH, fields)


def messages_of(*items: Any, **fields: Any) -> list[Json]:
    messages: list[Json] = asked(input=list(items), **fields).fields["messages"]
    return messages


FUNCTION_CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x":1}'}
CHAT_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}


def test_a_conversation_is_the_same_request_in_both_forms() -> None:
    """Instructions, messages, calls and results give the fields that a chat completion has for them."""
    request = read(
        {
            "model": "m",
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]},
                {"role": "developer", "content": "call f"},
                {"type": "message", "role": "assistant", "content": "I call f"},
                FUNCTION_CALL,
                {**FUNCTION_CALL, "call_id": "b"},
                {"type": "function_call_output", "call_id": "a", "output": "1"},
                {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
                FUNCTION_CALL,
                {"role": "user", "content": [{"type": "input_text", "text": "and"}]},
            ],
            "tools": [
                {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
            ],
            "tool_choice": {"type": "function", "name": "f"},
            "parallel_tool_calls": False,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}, "verbosity": "low"},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_logprobs": 2,
            "user": "u",
            "metadata": {"k": "v"},
            "store": False,
            "service_tier": "flex",
            "safety_identifier": "s",
            "prompt_cache_key": "p",
        }
    )
    assert request.untranslatable is None
    assert request.native
    assert not request.stream
    assert not request.ignored
    assert request.fields == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "developer", "content": "call f"},
            {"role": "assistant", "content": "I call f", "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "b"}]},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
            {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
            {"role": "user", "content": "and"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}},
        "verbosity": "low",
        "reasoning_effort": "low",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_logprobs": 2,
        "logprobs": True,
        "user": "u",
        "metadata": {"k": "v"},
        "store": False,
        "service_tier": "flex",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
    }


def test_text_is_one_message_of_the_user() -> None:
    """`input` as text is the same request as one message with that text."""
    plain = asked(input="hi").fields
    assert plain == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    part = {"type": "input_text", "text": "hi"}
    assert (
        asked(
            input=[{"type": "message", "id": "msg_1", "status": "completed", "role": "user", "content": [part]}]
        ).fields
        == plain
    )


def test_parts_of_a_message() -> None:
    """Images, files, audio and refusals are chat completions' parts."""
    breakpoint_ = {"mode": "explicit"}
    content = [
        {"type": "input_text", "text": "see", "prompt_cache_breakpoint": breakpoint_},
        {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low", "file_id": None},
        {"type": "input_file", "file_data": "data:application/pdf;base64,AA", "filename": "a.pdf"},
        {"type": "input_file", "file_id": "file-1", "detail": "high"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]
    request = asked(input=[{"role": "user", "content": content}])
    assert request.untranslatable is None
    assert request.fields["messages"][0]["content"] == [
        {"type": "text", "text": "see", "prompt_cache_breakpoint": breakpoint_},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA", "filename": "a.pdf"}},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]
    assert request.fields["input_details"] == [{"message": 0, "parts": [[3, {"detail": "high"}]]}]
    refusal = {"type": "refusal", "refusal": "no"}
    text = {"type": "output_text", "text": "well", "annotations": [], "logprobs": []}
    assert messages_of({"role": "assistant", "content": [refusal]}) == [
        {"role": "assistant", "content": None, "refusal": "no"}
    ]
    assert messages_of({"role": "assistant", "content": [text, refusal]}) == [
        {"role": "assistant", "content": "well", "refusal": "no"}
    ]


def test_reasoning_belongs_to_what_follows_it() -> None:
    """Reasoning is a field of the message or call after it; its id and encrypted text have a field of their own."""
    one = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "encrypted_content": "xyz",
    }
    other = {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "s"}]}
    request = asked(input=[one, {"role": "assistant", "content": "a"}, other, FUNCTION_CALL, one])
    assert request.fields["messages"] == [
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]
    assert request.fields["input_details"] == [
        {"message": 0, "reasoning": [{"id": "rs_1", "encrypted_content": "xyz"}]},
        {"message": 1, "reasoning": [{"id": "rs_2", "summary": [{"type": "summary_text", "text": "s"}]}]},
        {"message": 2, "no_message": True, "reasoning": [{"id": "rs_1", "encrypted_content": "xyz"}]},
    ]
    assert request.ignored == ("input_details",)


def test_custom_tools() -> None:
    """Custom tools, their calls and their results are chat completions' custom tools."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "d"}
    request = asked(
        tools=[{"type": "custom", "name": "f", "format": grammar}],
        tool_choice={"type": "custom", "name": "f"},
        input=[
            {"type": "custom_tool_call", "call_id": "a", "name": "f", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "a", "output": "y"},
        ],
    )
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "d"}}
    assert request.fields == {
        "model": "m",
        "tools": [{"type": "custom", "custom": {"name": "f", "format": form}}],
        "tool_choice": {"type": "custom", "custom": {"name": "f"}},
        "messages": [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "y"},
        ],
    }


@pytest.mark.parametrize(
    ("choice", "translated"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        ),
    ],
)
def test_choices_of_a_tool(choice: Any, translated: Any) -> None:
    """Each choice of a function is chat completions' own."""
    request = asked(tool_choice=choice)
    assert request.fields["tool_choice"] == translated
    assert request.untranslatable is None


@pytest.mark.parametrize(
    ("fields", "response_format"),
    [
        ({"text": {"format": {"type": "text"}}}, {"type": "text"}),
        ({"text": {"format": {"type": "json_object"}}}, {"type": "json_object"}),
        ({"text": {"format": None}}, None),
        ({"text": {}}, None),
    ],
)
def test_formats_of_the_text(fields: Json, response_format: Any) -> None:
    """Formats without a schema are the same in chat completions."""
    assert asked(**fields).fields.get("response_format") == response_format


@pytest.mark.parametrize("text", [None, "hi"])
@pytest.mark.parametrize(
    "fields",
    [
        {"include": ["reasoning.encrypted_content"]},
        {"truncation": "auto"},
        {"background": False},
        {"max_tool_calls": 3},
        {"prompt_cache_retention": "24h"},
        {"stream_options": {"include_obfuscation": False}},
        {"reasoning": {"summary": "auto"}},
        {"text": {"unknown": 1}},
        {"top_logprobs": 0},
        {"context_management": []},
    ],
)
def test_what_has_no_meaning_in_chat_completions_is_named(fields: Json, text: str | None) -> None:
    """A field without a meaning there stays, counts in the key, and is named as not sent."""
    request = asked(**fields)
    assert request.ignored == tuple(fields)
    assert request.untranslatable is None
    assert {name: request.fields[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}, "input": None}, "prompt"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "web_search_call", "id": "w"}]}, "input[1].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "assistant", "content": "x", "tool_calls": []}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f", "image_url": "u"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "u"}]}]}, "input[0].content[0]"),
        ({"tool_choice": {"type": "mcp", "server_label": "s"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice.tools"),
    ],
)
def test_what_chat_completions_cannot_say_is_an_error_without_the_api(fields: Json, param: str) -> None:
    """What only an upstream with the Responses API can do is named, and stays in the fields."""
    request = asked(**fields)
    assert request.untranslatable is not None
    assert request.untranslatable.param == param
    assert request.native
    assert asked().fields != request.fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": 1}]}, "input[0].type"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{**FUNCTION_CALL, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{**FUNCTION_CALL, "call_id": None}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"instructions": 5}, "instructions"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"text": "x"}, "text"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"reasoning": "low"}, "reasoning"),
        ({"include": "x"}, "include"),
        ({"stream": "yes"}, "stream"),
        ({"background": "yes"}, "background"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {}}, "response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"input_details": []}, "input_details"),
    ],
)
def test_what_cannot_be_read_is_named(fields: Json, param: str) -> None:
    """A field of a wrong type, or of the other form of API, is named."""
    with pytest.raises(InvalidRequest) as raised:
        asked(**fields)
    assert raised.value.param == param
    assert f"'{param}'" in raised.value.message


def test_extras_of_servers_pass() -> None:
    """Fields that the API does not have, and that servers add, keep their names."""
    extras = {"top_k": 5, "min_p": 0.1, "stop": ["x"], "seed": 1, "chat_template_kwargs": {"enable_thinking": False}}
    request = asked(**extras)
    assert {name: request.fields[name] for name in extras} == extras
    assert not request.ignored


def test_a_stream_is_asked_for_its_usage() -> None:
    """`stream` is no field of the request, and a stream ends with its usage."""
    request = asked(stream=True)
    assert (request.stream, request.include_usage) == (True, True)
    assert request.fields == asked().fields
    assert asked(stream=None).fields == asked().fields


def test_logprobs_that_are_included_are_asked_for() -> None:
    """`include` asks for log probabilities too."""
    assert asked(include=["message.output_text.logprobs"]).fields["logprobs"] is True


def test_a_response_that_nobody_knows() -> None:
    """`previous_response_id` stays for an upstream that may know it, and is else an error in OpenAI's words."""
    request = asked(previous_response_id="resp_1")
    assert request.fields["previous_response_id"] == "resp_1"
    error = request.untranslatable
    assert error is not None
    assert (error.status, error.code) == (404, "previous_response_not_found")
    assert error.message == "Previous response with id 'resp_1' not found."
    assert error.param == "previous_response_id"


def test_a_continued_request_repeats_the_id_and_is_not_sent_as_it_is() -> None:
    """A request whose conversation the gateway knows is only its own, and has no error and no earlier instructions."""
    fields = {"model": "m", "input": "and?", "instructions": "new", "previous_response_id": "resp_1"}
    whole = continued(fields, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])
    request = read(whole)
    assert (request.native, request.untranslatable) == (False, None)
    assert request.echo["previous_response_id"] == "resp_1"
    assert request.echo["instructions"] == "new"
    assert [message["content"] for message in request.fields["messages"]] == ["new", "hi", "ho", "and?"]
    assert "previous_response_id" not in request.fields
    assert fields["input"] == "and?", "the fields were changed"


@given(tidy_chats(), tidy_chats(), texts)
@settings(max_examples=60, deadline=None)
def test_a_continued_conversation_is_the_request_of_the_whole_one(one: Json, two: Json, text: str) -> None:
    """Turns that are continued by id give the fields of the conversation that a client sends in full."""
    record: list[Json] = []
    sent: list[Json] = []
    for answer in (one, two):
        asks = {"role": "user", "content": text}
        sent.append(asks)
        whole = read({"model": "m", "instructions": "i", "input": list(sent)})
        fields = {"model": "m", "instructions": "i", "input": text, "previous_response_id": "resp_1"}
        known = read(continued(fields, record))
        assert known.fields == whole.fields
        record = [*record, *input_list(text), *SURFACE.own_answer(answer, known, "e")["output"]]
        sent += SURFACE.own_answer(answer, whole, "e")["output"]
    plain = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in sent]
    if not any(item.get("type") == "reasoning" for item in sent):
        assert read({"model": "m", "input": plain}).fields == read({"model": "m", "input": record}).fields


@given(tidy_chats())
@settings(max_examples=60, deadline=None)
def test_an_answer_that_is_sent_back_is_the_message_that_it_was(answer: Json) -> None:
    """The items of an answer are the assistant's message that a client of chat completions sends back."""
    message = copied(answer["choices"][0]["message"])
    (read_back,) = asked(input=SURFACE.own_answer(answer, asked(), "e")["output"]).fields["messages"]
    said = {name: value for name, value in message.items() if value not in (None, "", [])}
    assert {name: value for name, value in read_back.items() if value not in (None, "", [])} == said


small = st.sampled_from(["a", "b", "ab", ""])
extra = st.fixed_dictionaries({}, optional={"phase": small, "x": small, "id": small, "status": small})


def thing(kind: str | None, required: Json, optional: Json | None = None) -> st.SearchStrategy[Json]:
    kinds: Json = {} if kind is None else {"type": st.just(kind)}
    fields: Json = {**kinds, **required}
    return st.tuples(st.fixed_dictionaries(fields, optional=optional or {}), extra).map(
        lambda both: {**both[1], **both[0]}
    )


small_parts = st.one_of(
    thing("input_text", {"text": small}),
    thing("output_text", {"text": small}, {"annotations": st.sampled_from([[], [1]])}),
    thing("refusal", {"refusal": small}),
    thing("input_image", {"image_url": small}, {"detail": small, "file_id": st.none() | small}),
    thing("input_file", {}, {"file_id": small, "file_url": small, "detail": small}),
    thing("unheard", {}, {"text": small}),
)
contents = small | st.lists(small_parts, max_size=2)
reasoning_parts = st.lists(st.fixed_dictionaries({"type": st.just("reasoning_text"), "text": small}), max_size=2)
small_items = st.one_of(
    thing(None, {"role": st.sampled_from(["user", "assistant", "system"]), "content": contents}),
    thing("message", {"role": st.just("assistant"), "content": contents}, {"name": small}),
    thing("reasoning", {"summary": reasoning_parts}, {"content": reasoning_parts, "encrypted_content": small}),
    thing("function_call", {"call_id": small, "name": small, "arguments": small}),
    thing("custom_tool_call", {"call_id": small, "name": small, "input": small}),
    thing("function_call_output", {"call_id": small, "output": contents}),
    thing("custom_tool_call_output", {"call_id": small, "output": contents}),
    thing("item_reference", {}, {"id": small}).filter(lambda item: "id" in item),
    thing("web_search_call", {}),
)
small_requests = st.fixed_dictionaries(
    {"model": small, "input": st.lists(small_items, max_size=4)},
    optional={
        "instructions": small,
        "temperature": st.sampled_from([0, 1]),
        "max_output_tokens": st.sampled_from([1, 2]),
        "text": st.fixed_dictionaries(
            {},
            optional={
                "verbosity": small,
                "format": st.sampled_from(
                    [{"type": "text"}, {"type": "json_schema", "name": "a"}, {"type": "json_schema", "json_schema": {}}]
                ),
            },
        ),
        "reasoning": st.fixed_dictionaries({}, optional={"effort": small, "summary": small}),
        "tools": st.lists(
            st.sampled_from([{"type": "function", "name": "a"}, {"type": "custom", "name": "a"}, {"type": "mcp"}]),
            max_size=2,
        ),
        "include": st.sampled_from([[], ["message.output_text.logprobs"]]),
        "top_logprobs": st.sampled_from([0, 1]),
        "previous_response_id": small,
        "x": small,
    },
)


def normal(fields: Json) -> Json:
    """The request without what asks nothing, as requests.py and input_items.py say."""
    items = [normal_item(item) for item in fields["input"]]
    if "instructions" in fields:
        items.insert(0, {"type": "message", "role": "system", "content": fields["instructions"]})
    rest = {name: value for name, value in fields.items() if name not in ("input", "instructions")}
    return {name: value for name, value in rest.items() if name not in ("text", "reasoning") or value} | {
        "input": items
    }


def normal_item(item: Json) -> Json:
    item = {"type": "message", **{name: value for name, value in item.items() if value is not None}}
    if item["type"] in ("item_reference", "web_search_call"):
        return item
    item.pop("status", None)
    if item["type"] == "reasoning":
        return {name: value for name, value in item.items() if value != []}
    item.pop("id", None)
    for name in ("content", "output"):
        if isinstance(item.get(name), list):
            item[name] = with_text_alone([normal_part(part) for part in item[name]])
    return item


def normal_part(part: Json) -> Json:
    part = {name: value for name, value in part.items() if value is not None and (name, value) != ("annotations", [])}
    return {**part, "type": "text"} if part["type"] in ("input_text", "output_text") else part


def with_text_alone(parts: list[Json]) -> Any:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" and len(parts[0]) == 2 else parts


def restored(fields: Json) -> Json:
    """The normal form of the request that has these fields: what differs in it differs in them."""
    details = {entry["message"]: entry for entry in fields.get("input_details", ())}
    calls: dict[str, str] = {}
    items: list[Json] = []
    for index, message in enumerate(fields["messages"]):
        items += restored_items(message, details.get(index, {}), calls)
    request = {name: value for name, value in fields.items() if name not in ("messages", "input_details", "logprobs")}
    text, reasoning = request.pop("text", {}), request.pop("reasoning", {})
    if "verbosity" in request:
        text["verbosity"] = request.pop("verbosity")
    if (form := request.pop("response_format", None)) is not None:
        text["format"] = {"type": form["type"], **form.get("json_schema", {})}
    if "reasoning_effort" in request:
        reasoning["effort"] = request.pop("reasoning_effort")
    if "max_tokens" in request:
        request["max_output_tokens"] = request.pop("max_tokens")
    if "tools" in request:
        request["tools"] = [{"type": tool["type"], **tool.get(tool["type"], {})} for tool in request["tools"]]
    objects = {"text": text, "reasoning": reasoning}
    return {**request, **{name: value for name, value in objects.items() if value}, "input": items}


def restored_items(message: Json, details: Json, calls: dict[str, str]) -> list[Json]:
    if "type" in message:
        return [message]
    content = restored_content(message["content"], details.get("parts", ()))
    further = details.get("item", {})
    if message["role"] == "tool":
        call_id = message["tool_call_id"]
        kind = "custom_tool_call_output" if calls.get(call_id) == "custom" else "function_call_output"
        return [{"type": kind, "call_id": call_id, "output": content, **further}]
    items = []
    kept = details.get("reasoning", [])
    shown = "reasoning_content" in message and len(kept) <= 1 and "content" not in (kept or [{}])[0]
    for item in kept or [{}] * shown:
        part = {"type": "reasoning_text", "text": message.get("reasoning_content")}
        items.append({"type": "reasoning", **item, **({"content": [part]} if shown else {})})
    if "refusal" in message:
        refusal = {"type": "refusal", "refusal": message["refusal"]}
        further_text = dict(details.get("parts", ())).get(0, {})
        said = [] if message["content"] is None else [{"type": "text", "text": message["content"], **further_text}]
        content = [*said, refusal]
    if content is not None and not details.get("no_message"):
        named = {"name": message["name"]} if "name" in message else {}
        items.append({"type": "message", "role": message["role"], "content": content, **named, **further})
    further_of_calls = dict(details.get("calls", ()))
    for number, call in enumerate(message.get("tool_calls", ())):
        calls[call["id"]] = call["type"]
        kind = "custom_tool_call" if call["type"] == "custom" else "function_call"
        items.append({"type": kind, "call_id": call["id"], **call[call["type"]], **further_of_calls.get(number, {})})
    return items


def restored_content(content: Any, details: Any) -> Any:
    if content is None:
        return None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [restored_part(p) for p in content]
    for place, further in details:
        parts[place] |= further
    return with_text_alone(parts)


def restored_part(part: Json) -> Json:
    if part["type"] == "image_url":
        rest = {name: value for name, value in part.items() if name != "image_url"}
        return {**rest, "type": "input_image", "image_url": part["image_url"]["url"]} | {
            name: value for name, value in part["image_url"].items() if name != "url"
        }
    if part["type"] == "file":
        return {**{name: value for name, value in part.items() if name != "file"}, "type": "input_file", **part["file"]}
    return dict(part)


@given(small_requests)
@settings(max_examples=500, deadline=None)
def test_requests_that_differ_have_fields_that_differ(fields: Json) -> None:
    """The fields say all that the request asks, so requests that ask different things have different fields."""
    assert restored(copied(read(fields).fields)) == normal(fields)


@given(small_requests, st.data())
@settings(max_examples=200, deadline=None)
def test_requests_that_ask_the_same_have_one_key(fields: Json, data: st.DataObject) -> None:
    """What asks nothing does not change the fields: nulls, ids, states, and the names of kinds of text."""
    other = copied(fields)
    for item in other["input"]:
        if item.get("type", "message") not in ("item_reference", "web_search_call", "reasoning"):
            item["id"] = data.draw(small)
        item["unheard"] = None
        if item.get("type") in ("message", "reasoning", "function_call"):
            item["status"] = data.draw(small)
        parts = item.get("content") if item.get("type") != "reasoning" else ()
        for part in parts if isinstance(parts, list) else ():
            if part["type"] in ("input_text", "output_text"):
                part["type"] = data.draw(st.sampled_from(["input_text", "output_text", "text"]))
            part["unheard"] = None
    one, same = (read(request).fields for request in (fields, {**other, "unheard": None}))
    assert one == same
    assert request_key("n", "chat.completions", one) == request_key("n", "chat.completions", same)


@st.composite
def hostile_requests(draw: st.DrawFn) -> Json:
    """A request with any JSON value in one place."""
    fields = {
        "model": "m",
        "instructions": "i",
        "input": draw(st.lists(small_items, max_size=3)),
        "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "f", "format": {"type": "grammar"}}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
        "reasoning": {"effort": "low"},
        "include": [],
        "previous_response_id": "resp_1",
        "stream": True,
        "top_logprobs": 1,
    }
    where: Any = fields
    while True:
        key = draw(st.sampled_from(sorted(where)) if isinstance(where, dict) else st.integers(0, len(where) - 1))
        if not isinstance(where[key], dict | list) or not where[key] or draw(st.booleans()):
            where[key] = draw(values)
            return fields
        where = where[key]


@given(hostile_requests())
@settings(max_examples=300, deadline=None)
def test_any_value_in_any_place_is_read_or_named(fields: Json) -> None:
    """A request with any JSON value in any place raises InvalidRequest or goes through, and is answered."""
    before = copied(fields)
    try:
        request = read(fields)
    except InvalidRequest:
        return
    finally:
        assert fields == before, "the fields were changed"
    own = SURFACE.own_answer({"id": "c", "choices": [{"message": {"content": "x"}}]}, request, "e")
    try:
        SURFACE.chat_answer(own)
    except UnstorableAnswer:
        pytest.fail("an answer of ours is no answer")


@pytest.mark.parametrize(
    "kind", ["web_search", "file_search", "code_interpreter", "computer", "mcp", "image_generation"]
)
def test_tools_that_a_provider_runs_are_not_sent(kind: str) -> None:
    """They count in the key, and are named as not sent; the functions beside them are sent."""
    request = asked(tools=[{"type": kind}, {"type": "function", "name": "f"}], tool_choice="auto")
    assert request.untranslatable is None
    assert request.fields["tools"][0] == {"type": kind}
    assert request.chat_fields["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert request.unsent == ["tools[0]"]
    alone = asked(tools=[{"type": kind}], tool_choice="auto", parallel_tool_calls=True)
    empty = asked(tools=[], tool_choice="auto", parallel_tool_calls=True)
    for request in (alone, empty):
        assert not {"tools", "tool_choice", "parallel_tool_calls"} & request.chat_fields.keys()


def test_functions_of_a_namespace_have_longer_names() -> None:
    """Each is a function by itself, also in earlier calls, and a call of it has the name and the namespace again."""
    inner = {"type": "function", "name": "list", "description": "Lists.", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "crm", "description": "Customers.", "tools": [inner]}]
    call = {"type": "function_call", "call_id": "c", "name": "list", "namespace": "crm", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "none"}
    request = asked(tools=tools, input=[{"role": "user", "content": "Whom?"}, call, output])
    (tool,) = request.fields["tools"]
    assert tool["function"]["name"] == "crm__list"
    assert tool["function"]["description"] == "Customers.\nLists."
    assert request.fields["messages"][1]["tool_calls"][0]["function"]["name"] == "crm__list"
    called = {"id": "c", "type": "function", "function": {"name": "crm__list", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [called]}
    answer = {"id": "x", "created": 1, "model": "m", "choices": [{"index": 0, "message": message}]}
    (item,) = own_answer(answer, request, "entry")["output"]
    assert (item["namespace"], item["name"]) == ("crm", "list")
    assert chat_answer(own_answer(answer, request, "entry")) == answer


@pytest.mark.parametrize("tools", [None, "x", [{"type": "function"}], [1]])
def test_a_namespace_without_tools_is_refused_by_name(tools: Any) -> None:
    """What is no list of tools is named with its place."""
    with pytest.raises(InvalidRequest, match=r"'tools\[0\]\.tools"):
        asked(tools=[{"type": "namespace", "name": "crm", "tools": tools}])
