"""A request is asked as a chat completion that says the same."""

from typing import Any

import pytest

from cache.entries.key import request_key
from gateway.errors import InvalidRequest
from gateway.surfaces.messages.surface import MessagesSurface
from gateway.surfaces.surface import ChatRequest

Json = dict[str, Any]

SURFACE = MessagesSurface()
MARKER = {"type": "ephemeral"}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


def asked(*messages: Json, **fields: Any) -> ChatRequest:
    turns = list(messages) or [{"role": "user", "content": "Hi"}]
    return SURFACE.chat_request("/v1/messages", {"model": "m", "max_tokens": 9, "messages": turns, **fields})


def turns(*messages: Json, **fields: Any) -> Any:
    return asked(*messages, **fields).fields["messages"]


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": list(blocks)}


def key(fields: Json) -> str:
    return request_key("public", "chat.completions", fields).id


def test_a_conversation_is_the_one_that_a_chat_client_writes() -> None:
    """System prompt, turns, calls and results written for either API are the same fields."""
    request = asked(
        {"role": "user", "content": "Weather in Rome and Oslo?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "c2", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        user(
            {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "snow"}]},
            {"type": "text", "text": "In one line, please."},
        ),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c3", "name": "now", "input": {}}]},
        user({"type": "tool_result", "tool_use_id": "c3"}),
        system=[{"type": "text", "text": "Be brief."}],
        temperature=0,
        stop_sequences=["\n\n"],
        tools=[{"name": "weather", "description": "Tells it.", "input_schema": WEATHER}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        metadata={"user_id": "u"},
    )
    assert request.fields == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0,
        "stop": ["\n\n"],
        "user": "u",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather in Rome and Oslo?"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
                    {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "c2", "content": "snow"},
            {"role": "user", "content": "In one line, please."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c3", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c3", "content": ""},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
    }
    assert request.untranslatable is None
    assert request.ignored == ()


@pytest.mark.parametrize("nothing", [None, "", []])
def test_no_system_prompt(nothing: Any) -> None:
    """An empty system prompt is none, so a chat template puts in its own as it does without one."""
    assert asked(system=nothing).fields == asked().fields


def test_a_stream_is_the_same_request() -> None:
    """Whether a client streams is not in the fields; a stream always has its usage."""
    plain, stream = asked(stream=False), asked(stream=True)
    assert plain.fields == stream.fields
    assert (plain.stream, plain.include_usage) == (False, False)
    assert (stream.stream, stream.include_usage) == (True, True)


def test_results_come_before_the_text_of_their_turn() -> None:
    """Servers of chat completions take the results of calls only directly after the calls."""
    made = turns(
        user(
            {"type": "text", "text": "Here."},
            {"type": "tool_result", "tool_use_id": "a", "content": "1", "is_error": True},
            {"type": "tool_result", "tool_use_id": "b", "content": "2", "is_error": False},
        )
    )
    assert made == [
        {"role": "tool", "tool_call_id": "a", "content": "1", "is_error": True},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "user", "content": "Here."},
    ]


def test_texts_images_and_documents() -> None:
    """Blocks are parts, several texts stay several, and what has no name in a part is under `anthropic`."""
    text_source = {"type": "text", "media_type": "text/plain", "data": "Once."}
    made = turns(
        user(
            {"type": "text", "text": "a"},
            {"type": "text", "text": "b"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
            {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
            {
                "type": "document",
                "title": "T",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="},
            },
            {"type": "document", "title": "T", "context": "C", "source": text_source, "citations": {"enabled": True}},
        )
    )
    assert made[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
        {
            "type": "file",
            "file": {"filename": "T", "file_data": "data:application/pdf;base64,aGk="},
            "anthropic": {"title": "T"},
        },
        {
            "type": "text",
            "text": "T\n\nC\n\nOnce.",
            "anthropic": {
                "type": "document",
                "title": "T",
                "context": "C",
                "citations": {"enabled": True},
                "source": {"type": "text", "media_type": "text/plain"},
            },
        },
    ]


def test_thoughts() -> None:
    """Thoughts without a signature are a text; signed and redacted ones are kept beside it."""
    unsigned = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    signed = [{**unsigned, "signature": "c2ln"}, {"type": "redacted_thinking", "data": "ZGF0YQ=="}]
    answer = {"type": "text", "text": "Yes."}
    again = {"role": "user", "content": "Sure?"}
    made = turns({"role": "assistant", "content": [unsigned, answer]}, again)
    assert made[0] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    made = turns({"role": "assistant", "content": [*signed, answer]}, again)
    assert made[0] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
        "thinking_blocks": signed,
    }


def test_markers_are_passed_on_and_are_not_part_of_the_key() -> None:
    """Where a client wants its prompt cached is told to the upstream, and does not change what is asked."""
    marked = asked(
        user({"type": "text", "text": "a", "cache_control": MARKER}),
        {"role": "assistant", "content": [{"type": "text", "text": "b", "cache_control": MARKER}]},
        user({"type": "tool_result", "tool_use_id": "c", "content": "d", "cache_control": MARKER}),
        system=[{"type": "text", "text": "s", "cache_control": MARKER}],
        tools=[{"name": "f", "input_schema": {}, "cache_control": MARKER}],
    ).fields
    assert [message.get("cache_control") for message in marked["messages"]] == [None, None, None, MARKER]
    assert [message["content"] for message in marked["messages"]] == [
        [{"type": "text", "text": "s", "cache_control": MARKER}],
        [{"type": "text", "text": "a", "cache_control": MARKER}],
        [{"type": "text", "text": "b", "cache_control": MARKER}],
        "d",
    ]
    assert marked["tools"][0]["cache_control"] == MARKER
    plain = asked(
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        user({"type": "tool_result", "tool_use_id": "c", "content": "d"}),
        system="s",
        tools=[{"name": "f", "input_schema": {}}],
    ).fields
    assert key(marked) == key(plain)


def test_prefill_is_continued() -> None:
    """A text that the client has put into the assistant's mouth is continued, as servers of chat models can."""
    question = {"role": "user", "content": "2 + 2 = ?"}
    continued = asked(question, {"role": "assistant", "content": "The answer is ("}).fields
    assert continued["continue_final_message"] is True
    assert continued["add_generation_prompt"] is False
    assert "continue_final_message" not in asked(question).fields


def test_what_has_no_meaning_in_chat_completions_is_named() -> None:
    """Fields that are Anthropic's alone are part of the key, and are not sent to an upstream without Messages."""
    request = asked(
        thinking={"type": "adaptive"},
        service_tier="auto",
        context_management={"edits": []},
        output_config={"effort": "low", "task_budget": {"type": "tokens", "total": 9}},
        metadata={"user_id": "u", "team": "t"},
    )
    assert set(request.ignored) == {"thinking", "service_tier", "context_management", "output_config", "metadata"}
    assert request.fields["reasoning_effort"] == "low"
    assert request.fields["output_config"] == {"task_budget": {"type": "tokens", "total": 9}}
    assert (request.fields["user"], request.fields["metadata"]) == ("u", {"team": "t"})
    assert request.fields["thinking"] == {"type": "adaptive"}
    assert key(asked(thinking={"type": "adaptive"}).fields) != key(asked().fields)


def test_fields_that_servers_have_besides_pass() -> None:
    """What is not Anthropic's is passed on under its own name."""
    extras = {"chat_template_kwargs": {"enable_thinking": False}, "min_p": 0.1, "repetition_penalty": 1.1, "top_k": 5}
    request = asked(**extras)
    assert extras.items() <= request.fields.items()
    assert request.ignored == ()


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_schema(name: str) -> None:
    """A schema of the answer is a response format, under the newer name and the older one."""
    form = {"type": "json_schema", "schema": WEATHER}
    request = asked(**{name: {"format": form} if name == "output_config" else form})
    assert request.fields["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": WEATHER, "strict": True},
    }
    assert name not in request.fields


def test_tools() -> None:
    """A tool of the client is a function; what functions do not have is under `anthropic`."""
    tool = {
        "type": "custom",
        "name": "f",
        "input_schema": WEATHER,
        "strict": True,
        "input_examples": [{"city": "Rome"}],
        "description": None,
    }
    assert asked(tools=[tool]).fields["tools"] == [
        {
            "type": "function",
            "function": {"name": "f", "parameters": WEATHER, "strict": True},
            "anthropic": {"input_examples": [{"city": "Rome"}]},
        }
    ]
    assert "tools" not in asked(tools=[]).fields


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "none"}, {"tool_choice": "none"}),
    ],
)
def test_tool_choice(choice: Json, fields: Json) -> None:
    """Each choice has its name in chat completions."""
    made = asked(tool_choice=choice).fields
    assert {name: made[name] for name in made if name in ("tool_choice", "parallel_tool_calls")} == fields


SERVER_CALL = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ({"container": "container_1"}, "container"),
        ({"messages": [{"role": "assistant", "content": [SERVER_CALL]}]}, "messages[0].content[0].type"),
        (
            {"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference"}]})]},
            "messages[0].content[0].content[0].type",
        ),
    ],
)
def test_what_chat_completions_cannot_ask(fields: Json, param: str) -> None:
    """Anthropic's own tools and files are asked of an upstream that has Messages, and of no other."""
    request = asked(**fields)
    assert request.untranslatable is not None
    assert request.untranslatable.param == param
    assert f"'{param}'" in request.untranslatable.message
    assert request.native


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"messages": None}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [user("Hi")]}, "messages[0].content[0]"),  # type: ignore[arg-type]
        ({"messages": [user({"text": "Hi"})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "text", "text": 5})]}, "messages[0].content[0].text"),
        ({"messages": [user({"type": "image_url", "image_url": {"url": "x"}})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "image"})]}, "messages[0].content[0].source"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [user({"type": "image", "source": {"type": "base64", "media_type": "a;b", "data": ""}})]},
            "messages[0].content[0].source.media_type",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]},
            "messages[0].content[0].thinking",
        ),
        ({"system": 5}, "system"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"metadata": "u"}, "metadata"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"output_config": []}, "output_config"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_config": {"format": {}}, "output_format": {}}, "output_format"),
        ({"stop": ["x"]}, "stop"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_bad_requests_name_the_field(fields: Json, param: str) -> None:
    """What cannot be read is refused with the name of the field and what would be right."""
    with pytest.raises(InvalidRequest) as refused:
        asked(**fields)
    assert refused.value.param == param
    assert f"'{param}'" in refused.value.message


@pytest.mark.parametrize(
    "kind", ["web_search_20250305", "bash_20250124", "computer_20250124", "code_execution_20250825"]
)
def test_tools_that_anthropic_defines_are_not_sent(kind: str) -> None:
    """They count in the key, and are named as not sent; the client's own tools beside them are sent."""
    request = asked(tools=[{"name": "f"}, {"type": kind, "name": "x"}])
    assert request.untranslatable is None
    assert request.fields["tools"][1] == {"type": kind, "name": "x"}
    assert request.chat_fields["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert request.unsent == ["tools[1]"]


def test_what_claude_code_reports_to_anthropic_is_no_prompt() -> None:
    """The block that changes with each session is neither sent to another upstream nor part of the key."""
    prompt = {"type": "text", "text": "Be brief."}
    reports = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={n};"} for n in "ab"]
    one, other = (asked(system=[report, prompt]) for report in reports)
    assert one.fields == other.fields == asked(system="Be brief.").fields
