"""Requests for chats and prompts as those of chat completions: what is asked alike has one key, all else two."""

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.entries.key import request_key
from gateway.errors import InvalidRequest
from gateway.surfaces.ollama.chat import OllamaChatSurface
from gateway.surfaces.ollama.generate import OllamaGenerateSurface
from gateway.surfaces.surface import ChatRequest, Json
from tests.gateway.surfaces.ollama.examples import objects, quick, texts, values

USER: Json = {"role": "user", "content": "Hello"}
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(30)).decode()


def chat(**fields: Any) -> ChatRequest:
    return OllamaChatSurface().chat_request("/api/chat", {"model": "m", "messages": [USER], **fields})


def generate(**fields: Any) -> ChatRequest:
    return OllamaGenerateSurface().chat_request("/api/generate", {"model": "m", "prompt": "Hello", **fields})


def key(request: ChatRequest) -> str:
    return request_key("public", request.path, request.fields).id


def test_a_plain_conversation_is_that_of_chat_completions() -> None:
    """Equal fields, so that clients of both share an answer; Ollama's stream unless they say no."""
    messages = [{"role": "system", "content": "Be brief."}, USER]
    expected = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 9, "seed": 1, "stop": ["\n"]}
    options = {"temperature": 0, "num_predict": 9, "seed": 1, "stop": ["\n"]}

    for request in (
        chat(messages=messages, options=options, keep_alive="5m", tools=[], format="", stream=None),
        generate(system="Be brief.", options=options, keep_alive=-1, template="", suffix="", context=[], raw=False),
    ):
        assert request == ChatRequest(expected, stream=True)
    assert not chat(stream=False).stream


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"num_predict": -1}, {}),
        ({"num_predict": -2, "top_p": None}, {}),
        ({"num_predict": 0}, {}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1, "repeat_penalty": 1.1}),
        ({"top_k": 1, "min_p": 0.1, "presence_penalty": 1}, {"top_k": 1, "min_p": 0.1, "presence_penalty": 1}),
        ({"mirostat": 2, "typical_p": 0.7}, {"mirostat": 2, "typical_p": 0.7}),
    ],
    ids=str,
)
def test_options_of_sampling_are_fields(options: Json, fields: Json) -> None:
    """By the names of servers of chat completions."""
    assert chat(options=options) == ChatRequest({"model": "m", "messages": [USER], **fields}, stream=True)


def test_options_of_the_runtime_are_kept_and_not_sent() -> None:
    """A smaller context may give another answer: they count for the key. Unknown options are such for Ollama too."""
    request = chat(options={"num_ctx": 8192, "num_gpu": 1, "new": [1], "seed": 3}, truncate=True)
    assert request.fields["options"] == {"num_ctx": 8192, "num_gpu": 1, "new": [1]}
    assert set(request.ignored) == {"options", "truncate"}
    assert request.fields["seed"] == 3


@pytest.mark.parametrize(
    ("think", "fields"),
    [
        (True, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        (False, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
        ("low", {"reasoning_effort": "low"}),
    ],
)
def test_thinking_is_asked_for_as_servers_know_it(think: Any, fields: Json) -> None:
    """A switch is a variable of the chat template, a level a reasoning effort; Ollama's own name is not sent."""
    request = chat(think=think)
    assert request.fields == {"model": "m", "messages": [USER], "think": think, **fields}
    assert request.ignored == ("think",)


def test_a_format_is_a_response_format() -> None:
    """JSON, or a schema."""
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    named = {"name": "response", "schema": schema}
    assert chat(format="json").fields["response_format"] == {"type": "json_object"}
    assert chat(format=schema).fields["response_format"] == {"type": "json_schema", "json_schema": named}


def test_fields_that_ollama_does_not_read_have_no_effect() -> None:
    """One that is chat completions' gets another name and is not sent; one that is unknown to both is sent."""
    request = chat(temperature=0, n=2, **{"ollama.n": 1}, user="me", template="{{ .Prompt }}")
    names = {"ollama.temperature", "ollama.n", "ollama.ollama.n", "ollama.template"}
    assert set(request.ignored) == names
    assert set(request.fields) == {"model", "messages", "user"} | names
    assert generate(messages=[USER], tools=[1]).ignored == ("ollama.messages", "ollama.tools")


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n", "png"),
        (b"\xff\xd8\xff\xe0", "jpeg"),
        (b"GIF89a", "gif"),
        (b"RIFF\x00\n\x00\x00WEBP", "webp"),
        (b"BM", "bmp"),
        (b"unknown", "png"),
    ],
)
def test_images_are_parts_after_the_text(head: bytes, kind: str) -> None:
    """As data URLs, of the type that their first bytes tell."""
    image = base64.b64encode(head + bytes(40)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{image}"}}
    for request in (chat(messages=[{**USER, "images": [image]}]), generate(images=[image])):
        assert request.fields["messages"] == [{"role": "user", "content": [{"type": "text", "text": "Hello"}, part]}]
    alone = chat(messages=[{"role": "user", "images": [image]}])
    assert alone.fields["messages"][0]["content"] == [part]


def call(name: str, **fields: Any) -> Json:
    return {"function": {"name": name, "arguments": {"a": 1.0, "b": "é"}}, **fields}


def test_calls_and_results_are_joined_by_ids() -> None:
    """A result belongs to the first call of its name, in the last message with calls, that has none."""
    assistant = {"role": "assistant", "content": "", "thinking": "Hm"}
    request = chat(
        messages=[
            {**assistant, "tool_calls": [call("f"), call("g"), call("f")]},
            {"role": "tool", "content": "1", "tool_name": "g"},
            {"role": "tool", "content": "2", "tool_name": "f"},
            {"role": "tool", "content": "3", "name": "f"},
            {"role": "tool", "content": "4", "tool_name": "f"},
            {**assistant, "tool_calls": [call("f", id="call_3"), call("g"), call("h")]},
            {"role": "tool", "content": "5"},
            {"role": "tool", "content": "6", "tool_name": "other"},
            {"role": "tool", "content": "7", "tool_name": "h", "tool_call_id": "call_5"},
        ]
    )
    first, *results = request.fields["messages"]
    later, *late = results[4:]
    function = {"name": "f", "arguments": '{"a":1.0,"b":"é"}'}
    assert first["reasoning_content"] == "Hm"
    assert first["tool_calls"][0] == {"id": "call_0", "type": "function", "function": function}
    assert [c["id"] for c in first["tool_calls"]] == ["call_0", "call_1", "call_2"]
    assert [c["id"] for c in later["tool_calls"]] == ["call_3", "call_4", "call_5"]
    assert results[:4] == [
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
        {"role": "tool", "content": "2", "tool_call_id": "call_0"},
        {"role": "tool", "content": "3", "tool_call_id": "call_2", "name": "f"},
        {"role": "tool", "content": "4", "tool_name": "f"},
    ]
    assert late == [
        {"role": "tool", "content": "5", "tool_call_id": "call_3"},
        {"role": "tool", "content": "6", "tool_call_id": "call_4", "tool_name": "other"},
        {"role": "tool", "content": "7", "tool_call_id": "call_5"},
    ]


def test_what_ollama_adds_to_a_message_says_nothing() -> None:
    """It numbers the calls of a message, and reads roles in any case."""
    numbered = {"function": {"name": "f", "arguments": {}, "index": 0}}
    request = chat(messages=[{"role": "Assistant", "tool_calls": [numbered]}])
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": "call_0", "type": "function", "function": function}]
    assert request.fields["messages"] == [{"role": "assistant", "tool_calls": calls}]
    numbered["function"]["index"] = 5
    assert chat(messages=[{"role": "assistant", "tool_calls": [numbered]}]).fields != request.fields


def test_a_new_id_is_none_that_a_client_gave() -> None:
    """Else two calls would have one."""
    request = chat(messages=[{"role": "assistant", "tool_calls": [call("f"), call("f", id="call_0")]}])
    assert [c["id"] for c in request.fields["messages"][0]["tool_calls"]] == ["call_1", "call_0"]


def test_tools_are_sent_as_they_are() -> None:
    """They have OpenAI's form."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    assert chat(tools=tools).fields["tools"] == tools


def test_a_raw_prompt_is_a_completion() -> None:
    """So is one with a suffix; variables of chat templates and thinking have no meaning there."""
    raw = generate(raw=True, suffix="end", think=True, options={"temperature": 0}, logprobs=False)
    assert (raw.path, raw.untranslatable) == ("/v1/completions", None)
    sent = {name: value for name, value in raw.fields.items() if name not in raw.ignored}
    assert sent == {"model": "m", "prompt": "Hello", "temperature": 0}
    assert raw.fields["raw"] is True

    infill = generate(suffix="end")
    sent = {name: value for name, value in infill.fields.items() if name not in infill.ignored}
    assert (infill.path, sent) == ("/v1/completions", {"model": "m", "prompt": "Hello", "suffix": "end"})
    assert infill.fields["raw"] is False


@pytest.mark.parametrize(
    "fields",
    [
        {"template": "{{ .Prompt }}"},
        {"context": [1, 2]},
        {"system": "Be brief.", "raw": True},
        {"images": [PNG], "suffix": "end"},
        {"logprobs": True, "raw": True},
    ],
    ids=str,
)
def test_what_only_ollama_can_do_is_refused_to_others(fields: Json) -> None:
    """The error names the field. An upstream that has Ollama's API is asked all the same."""
    request = generate(**fields)
    name = next(iter(fields))
    assert request.untranslatable is not None
    assert request.untranslatable.param == name
    assert f"'{name}'" in request.untranslatable.message
    assert request.native
    assert name in request.fields


_image = "iVBORw0KGgo="
INVALID: list[tuple[str, Json]] = [
    ("stream", {"stream": "no"}),
    ("options", {"options": [1]}),
    ("format", {"format": "xml"}),
    ("format", {"format": True}),
    ("think", {"think": 1}),
    ("messages", {"messages": "Hello"}),
    ("messages[1]", {"messages": [USER, "Hello"]}),
    ("messages[0].role", {"messages": [{"content": "Hello"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}),
    ("messages[0].thinking", {"messages": [{**USER, "thinking": True}]}),
    ("messages[0].reasoning_content", {"messages": [{**USER, "reasoning_content": "Hm"}]}),
    ("messages[0].images", {"messages": [{**USER, "images": _image}]}),
    ("messages[0].images[0]", {"messages": [{**USER, "images": [f"data:image/png;base64,{_image}"]}]}),
    ("messages[0].images[1]", {"messages": [{**USER, "images": [_image, "https://a.example/b.png"]}]}),
    ("messages[0].images[0]", {"messages": [{**USER, "images": [""]}]}),
    ("messages[0].images[0]", {"messages": [{**USER, "images": [7]}]}),
    ("messages[0].tool_calls", {"messages": [{**USER, "tool_calls": {}}]}),
    ("messages[0].tool_calls[0]", {"messages": [{**USER, "tool_calls": ["f"]}]}),
    ("messages[0].tool_calls[0]", {"messages": [{**USER, "tool_calls": [{}]}]}),
    ("messages[0].tool_calls[0].function.name", {"messages": [{**USER, "tool_calls": [{"function": {}}]}]}),
    (
        "messages[0].tool_calls[0].function.arguments",
        {"messages": [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
    ),
    ("messages[0].tool_calls[0].id", {"messages": [{**USER, "tool_calls": [call("f", id=7)]}]}),
]


@pytest.mark.parametrize(("field", "fields"), INVALID, ids=str)
def test_what_cannot_be_read_is_refused_by_name(field: str, fields: Json) -> None:
    """The message names the field and says what would be right."""
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.param == field
    assert f"'{field}'" in refused.value.message


@pytest.mark.parametrize("name", ["prompt", "system", "suffix", "template", "raw", "images", "stream"])
def test_a_prompt_that_cannot_be_read_is_refused_by_name(name: str) -> None:
    """Each field has its type."""
    with pytest.raises(InvalidRequest) as refused:
        generate(**{name: 7})
    assert refused.value.param == name


def test_arguments_that_are_nested_too_deep_are_refused() -> None:
    """They cannot be written as a text."""
    deep: Json = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}])


_fields = st.sampled_from(
    ["messages", "prompt", "system", "images", "options", "format", "think", "tools", "raw", "suffix", "context"]
)
_messages = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "images", "tool_calls", "tool_name", "tool_call_id", "thinking", "x"]),
        values | st.just("tool") | st.lists(st.fixed_dictionaries({"function": values | objects, "id": values})),
    ),
    max_size=3,
)
_surrogates = st.text(st.characters(categories=["Cs", "L"]), max_size=3)


@quick
@given(st.dictionaries(_fields, values | _messages | _surrogates | st.lists(_surrogates)))
def test_any_body_is_read_or_refused(fields: Json) -> None:
    """Wrong types anywhere, lone surrogates and huge numbers raise nothing else."""
    for read in (chat, generate):
        try:
            read(**fields)
        except InvalidRequest:
            continue


# Few values for each field, so that two requests which are read as one are found.
_calls = st.lists(st.builds(call, st.sampled_from("fg")), min_size=1, max_size=2)
_distinct_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.sampled_from(["", "a"])},
        optional={
            "images": st.lists(st.sampled_from([PNG, _image]), min_size=1, max_size=2),
            "thinking": st.just("a"),
            "tool_calls": _calls,
            "tool_name": st.sampled_from("fg"),
            "name": st.just("f"),
            "x": st.just(1),
        },
    ),
    min_size=1,
    max_size=3,
)
_numbers = st.sampled_from([0, 1, 1.5])
_option_names = (
    "temperature",
    "num_predict",
    "repeat_penalty",
    "num_ctx",
    "max_tokens",
    "repetition_penalty",
    "mirostat",
)
_common = {
    **dict.fromkeys(("temperature", "max_tokens", "n", "ollama.n", "repeat_penalty", "truncate"), _numbers),
    "options": st.dictionaries(st.sampled_from(_option_names), st.sampled_from([1, 1.5]), min_size=1, max_size=2),
    "format": st.sampled_from(["json", {"type": "object"}, {"type": "json_object"}]),
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "object"}]),
    "think": st.sampled_from([True, False, "low"]),
    "reasoning_effort": st.just("low"),
    "chat_template_kwargs": st.just({"enable_thinking": True, "thinking": True}),
    "logprobs": st.booleans(),
    "tools": st.just([{"type": "function"}]),
    "template": st.just("t"),
    "context": st.just([1]),
}
_some = st.sampled_from(sorted(_common)).flatmap(lambda name: st.tuples(st.just(name), _common[name]))
_others = st.lists(_some, max_size=2).map(dict)
_chats = st.builds(lambda messages, rest: {**rest, "messages": messages}, _distinct_messages, _others)
_prompts = st.builds(
    lambda prompt, own, rest: {**rest, **own, "prompt": prompt},
    st.sampled_from("ab"),
    st.fixed_dictionaries(
        {},
        optional={
            "system": st.sampled_from("ab"),
            "suffix": st.just("a"),
            "raw": st.just(True),
            "images": st.just([PNG]),
            "messages": st.just([{"role": "user", "content": "a"}]),
        },
    ),
    _others,
)


@st.composite
def _two(draw: st.DrawFn, requests: st.SearchStrategy[Json]) -> tuple[Json, Json]:
    """A request, and one that has some of its fields from another."""
    one, other = draw(requests), draw(requests)
    changed = draw(st.sets(st.sampled_from(sorted({*one, *other})), max_size=2))
    kept = {name: value for name, value in one.items() if name not in changed}
    return one, kept | {name: other[name] for name in changed if name in other}


@settings(quick, max_examples=150)
@given(_two(_chats))
def test_two_chats_that_differ_have_two_keys(two: tuple[Json, Json]) -> None:
    """Whatever they differ in: no field of Ollama's is read as another one of chat completions'."""
    one, other = two
    assert (key(chat(**one)) == key(chat(**other))) == (one == other)


@settings(quick, max_examples=150)
@given(_two(_prompts))
def test_two_prompts_that_differ_have_two_keys(two: tuple[Json, Json]) -> None:
    """The same of prompts, raw ones and those with a suffix."""
    one, other = two
    assert (key(generate(**one)) == key(generate(**other))) == (one == other)


@quick
@given(_prompts, _chats)
def test_a_prompt_and_a_chat_share_a_key_only_as_one_conversation(prompt: Json, asked: Json) -> None:
    """A prompt is the last message of a chat."""
    if key(generate(**prompt)) != key(chat(**asked)):
        return
    messages = [{"role": "system", "content": prompt["system"]}] if "system" in prompt else []
    images = {"images": prompt["images"]} if "images" in prompt else {}
    messages.append({"role": "user", "content": prompt["prompt"], **images})
    assert asked["messages"] == messages
    assert not {"raw", "suffix", "messages", "tools", "template", "context"} & prompt.keys()


@quick
@given(texts, texts)
def test_arguments_keep_their_order(one: str, other: str) -> None:
    """A model sees them in the order in which it wrote them."""
    given_arguments = {one: 1, other: 2}
    request = chat(
        messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given_arguments}}]}]
    )
    written = request.fields["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert list(msgspec.json.decode(written)) == list(given_arguments)
