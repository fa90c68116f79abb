"""Two requests share a key exactly when one answer serves both."""

import copy
import os
import subprocess
import sys
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cache.entries.key import Key, namespace_for, namespace_of, priority_of, request_key

Json = dict[str, Any]

# No deadline: how busy the machine is says nothing about the code.
quick = settings(max_examples=50, deadline=None)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
# Those that a key leaves out, or that are more than a value of their own; hypothesis tries words of the code as well.
read_otherwise = (
    *("stream", "stream_options", "messages", "priority", "cache_control", "client_metadata", "metadata", "store"),
    *("user", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
)
bodies = st.dictionaries(texts.filter(lambda name: name not in read_otherwise), values)

# So few that two draws are often alike.
few_values = st.sampled_from([None, 0, 0.0, -0.0, 1, True, False, "0", "1", "", [], {}, [0], [None], [0.0], {"a": 0}])
few_bodies = st.dictionaries(st.sampled_from("ab"), few_values | st.lists(few_values, max_size=2))


def chat(**fields: Any) -> Json:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def key(body: Json, namespace: str = "public", family: str = "chat.completions") -> Key:
    return request_key(namespace, family, body)


def shuffled(value: Any, order: Random) -> Any:
    """The same JSON with the fields of every object in another order."""
    if isinstance(value, dict):
        names = list(value)
        order.shuffle(names)
        return {name: shuffled(value[name], order) for name in names}
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


def without_nulls(body: Json) -> Json:
    return {name: value for name, value in body.items() if value is not None}


def one_number(value: Any) -> Any:
    """JSON in a form that Python compares as JSON means it: 1 and 1.0 one number, 1 and true two things."""
    if isinstance(value, dict):
        return {"object": sorted((name, one_number(item)) for name, item in value.items())}.__repr__()
    if isinstance(value, list):
        return repr(["list", *(one_number(item) for item in value)])
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return repr(int(value))
    return repr(value)


@given(bodies, st.randoms(use_true_random=False))
@quick
def test_the_order_of_fields_does_not_count(body: Json, order: Random) -> None:
    """The order of fields, at every depth, does not change the key."""
    assert key(shuffled(body, order)) == key(body)


@given(bodies | few_bodies, bodies | few_bodies)
@example({"a": 0}, {"a": 0.0})
@example({"a": [1, 2]}, {"a": [2, 1]})
@quick
def test_requests_that_say_different_things_have_different_keys(one: Json, other: Json) -> None:
    """Two requests have equal keys exactly if their JSON is equal without null fields."""
    same = one_number(without_nulls(one)) == one_number(without_nulls(other))
    assert (key(one) == key(other)) == same


@given(bodies, texts, values, values)
@quick
def test_every_field_counts(body: Json, name: str, value: Any, other: Any) -> None:
    """Another value of any field, known or unknown, changes the key."""
    assume(name not in read_otherwise)
    nothing = {"value": None}
    assume(one_number(value) != one_number(other))
    assume(without_nulls({"value": value}) != nothing)
    assert key({**body, name: value}) != key({**body, name: other})


@given(bodies)
@quick
def test_making_a_key_does_not_change_the_request(body: Json) -> None:
    """Making a key leaves the body of the request as it was."""
    before = copy.deepcopy(body)
    key(body)
    assert repr(body) == repr(before)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("chat_template", "{{ x }}"),
        ("top_k", 1),
        ("ignore_eos", True),
        ("stop", ["x"]),
        ("seed", 1),
        ("service_tier", "flex"),
        ("n", 2),
        ("logit_bias", {"50256": -100}),
        ("response_format", {"type": "json_object"}),
        ("tools", []),
        ("tool_choice", "none"),
        ("reasoning_effort", "low"),
        ("lora_request", "a"),
        ("prompt_logprobs", 0),
        ("", 0),
    ],
)
def test_a_parameter_of_any_server_counts(field: str, value: Any) -> None:
    """Every parameter changes the key, whichever server defines it."""
    assert key(chat(**{field: value})) != key(chat())


@given(bodies, st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
@quick
def test_an_integer_priority_does_not_count(body: Json, one: int, other: int) -> None:
    """An integer priority of a request does not change its key."""
    assert key({**body, "priority": one}) == key({**body, "priority": other}) == key({**body, "priority": None})
    assert priority_of({**body, "priority": one}) == one
    assert priority_of({**body, "priority": None}) is None


@pytest.mark.parametrize("value", ["high", 1.5, 1.0, True, 2**63, [1], {"level": 1}])
def test_a_priority_of_another_type_counts(value: Any) -> None:
    """A priority that is not a 64-bit integer changes the key."""
    assert key(chat(priority=value)) != key(chat())
    assert priority_of(chat(priority=value)) is None


def test_a_priority_below_the_top_level_counts() -> None:
    """A field named priority below the top level changes the key."""
    assert key(chat(tools=[{"priority": 1}])) != key(chat(tools=[{"priority": 2}]))


def test_text_is_never_taken_for_a_field() -> None:
    """A value whose text spells another field gives another key than that field."""
    assert key(chat(stop="xtemperature: 0")) != key(chat(stop="x", temperature=0))
    assert key(chat(stop="x", temperature=0)) != key(chat(stop='x","temperature":0,"a":"'))
    assert key({"a": "b", "c": "d"}) != key({"a": "bcd"})
    assert key({"ab": "c"}) != key({"a": "bc"})
    assert key({"a": ["b", "c"]}) != key({"a": ["bc"]})
    assert key({"a": [["b"], "c"]}) != key({"a": [["b", "c"]]})


@pytest.mark.parametrize(("one", "other"), [(0, 0.0), (0, -0.0), (1, 1.0), (-3, -3.0), (100, 1e2), (2**52, 2.0**52)])
def test_one_number_in_two_spellings_has_one_key(one: int, other: float) -> None:
    """An integer and a float of equal value give the same key at every depth."""
    assert key(chat(temperature=one)) == key(chat(temperature=other))
    assert key(chat(tools=[{"x": [one]}])) == key(chat(tools=[{"x": [other]}]))


def test_different_values_have_different_keys() -> None:
    """Values that differ in type or in any digit give different keys."""
    spellings = [1, True, "1", "true", [1], {"1": 1}, 0, False, "", [], {}, 0.1, 0.10000000000000002, "null", 2**63]
    spellings += [2**64 + 1, 2**64 + 2, -(2**64), 2**64, float(2**64), 2**53 + 1, 2**53 + 2, 10**4000, 10**4000 + 1]
    spellings += [str(2**64 + 1), hex(2**64 + 1), 1e300]
    keys = [key(chat(seed=spelling)) for spelling in spellings]
    assert len(set(keys)) == len(spellings)
    assert key(chat(seed=None)) not in keys


def test_a_number_of_any_length_has_a_key() -> None:
    """An integer too long for Python to print has a key of its own."""
    assert key(chat(seed=10**50_000)) != key(chat(seed=10**50_000 + 1))


@pytest.mark.parametrize("field", ["temperature", "stop", "tools", "unheard_of"])
def test_a_null_field_equals_an_absent_one(field: str) -> None:
    """A null field gives the same key as an absent one."""
    assert key(chat(**{field: None})) == key(chat())
    message = {"role": "user", "content": "hi"}
    assert key({"messages": [message | {field: None}]}) == key({"messages": [message]})


def test_null_inside_a_schema_is_a_value() -> None:
    """A null inside a schema or inside an unknown field changes the key."""

    def tools(schema: Json) -> Json:
        return chat(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])

    assert key(tools({"const": None})) != key(tools({}))
    assert key(tools({"enum": [None]})) != key(tools({"enum": []}))
    assert key(chat(custom={"a": None})) != key(chat(custom={}))


def test_one_text_part_equals_its_text() -> None:
    """Message content gives the same key as a string and as a single text part, for every role."""
    for role in ("system", "user", "assistant", "tool"):
        plain = {"messages": [{"role": role, "content": "x"}]}
        parts = {"messages": [{"role": role, "content": [{"type": "text", "text": "x"}]}]}
        assert key(plain) == key(parts)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "x"}, {"type": "text", "text": ""}],
        [{"type": "text", "text": "x", "citations": {"enabled": True}}],
        [{"type": "text", "cache_control": "x"}],
        [{"text": "x", "cache_control": {"type": "ephemeral"}}],
        [{"type": "input_text", "text": "x"}],
        [{"type": "text", "text": ["x"]}],
        [{"type": "text"}],
        [["x"]],
        ["x"],
        {"type": "text", "text": "x"},
        [],
        None,
        "",
    ],
)
def test_other_content_does_not_equal_its_text(content: Any) -> None:
    """Content other than exactly one plain text part gives another key than its text."""
    assert key({"messages": [{"role": "user", "content": content}]}) != key(
        {"messages": [{"role": "user", "content": "x"}]}
    )


MARKER = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def tool(where: str = "", **function: Any) -> Json:
    """A tool with a marker on itself, on its function or nowhere."""
    marked = MARKER if where == "function" else {}
    plain = {"type": "function", "function": {"name": "f", **function, **marked}}
    return plain | MARKER if where == "tool" else plain


def test_markers_for_prompt_caching_do_not_count() -> None:
    """`cache_control` on a message, a content part, a tool or its function does not change the key."""
    for role in ("system", "user", "assistant", "tool"):
        plain = {"messages": [{"role": role, "content": "x"}]}
        marked = {"messages": [{"role": role, "content": "x"} | MARKER]}
        part = {"messages": [{"role": role, "content": [{"type": "text", "text": "x"} | MARKER]}]}
        assert key(marked) == key(part) == key(plain)
    parts: list[Json] = [
        {"type": "text", "text": "x"},
        {"type": "image_url", "image_url": {"url": "https://a.example"}},
    ]
    assert key({"messages": [{"content": [part | MARKER for part in parts]}]}) == key(
        {"messages": [{"content": parts}]}
    )
    assert key(chat(tools=[tool("tool")])) == key(chat(tools=[tool("function")])) == key(chat(tools=[tool()]))
    flat = {"name": "f", "input_schema": {}}
    assert key(chat(tools=[flat | MARKER])) == key(chat(tools=[flat]))


def test_a_field_of_ones_own_called_cache_control_counts() -> None:
    """`cache_control` in a schema, in the arguments of a call or in any other place changes the key."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    called = call | {"function": {"name": "f", "arguments": MARKER}}
    pairs: list[tuple[Json, Json]] = [
        (chat(tools=[tool(parameters={"properties": MARKER})]), chat(tools=[tool(parameters={"properties": {}})])),
        (chat(tools=[tool(parameters=MARKER)]), chat(tools=[tool(parameters={})])),
        ({"messages": [{"tool_calls": [called]}]}, {"messages": [{"tool_calls": [call]}]}),
        ({"messages": [{"content": {"type": "text", "text": "x"} | MARKER}]}, {"messages": [{"content": {}}]}),
        ({"messages": [{"content": [{"image_url": MARKER}]}]}, {"messages": [{"content": [{"image_url": {}}]}]}),
        (chat(custom=MARKER), chat(custom={})),
        (chat(response_format=tool("function")), chat(response_format=tool())),
        (chat(tools=tool("tool")), chat(tools=tool())),
    ]
    for one, other in pairs:
        assert key(one) != key(other)


few_messages: st.SearchStrategy[Json] = st.dictionaries(
    st.sampled_from(["role", "content", "cache_control", "name"]),
    st.sampled_from(
        ["x", None, [], [{}], [{"type": "text", "text": "x"}], [{"type": "text", "text": "x"} | MARKER], [1]]
    ),
)


def unmarked(message: Json) -> str:
    """A message without markers, with one text part as its text, in a form that Python compares."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [without_markers(part) if isinstance(part, dict) else part for part in content]
        content = "x" if parts == [{"type": "text", "text": "x"}] else parts
    return str(one_number(without_nulls(without_markers({**message, "content": content}))))


def without_markers(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if name != "cache_control"}


@given(st.lists(few_messages, max_size=2), st.lists(few_messages, max_size=2))
@quick
def test_messages_differ_only_in_what_counts(one: list[Json], other: list[Json]) -> None:
    """Two lists of messages have equal keys exactly if they are equal without markers and null fields."""
    same = [unmarked(message) for message in one] == [unmarked(message) for message in other]
    assert (key({"messages": one}) == key({"messages": other})) == same


def test_text_parts_equal_their_text_in_messages_only() -> None:
    """A list of one text part outside of messages gives another key than its text."""
    part = [{"type": "text", "text": "x"}]
    assert key({"prompt": part}) != key({"prompt": "x"})
    assert key({"content": part}) != key({"content": "x"})
    assert key({"tools": [{"content": part}]}) != key({"tools": [{"content": "x"}]})
    assert key({"messages": [{"role": "user", "other": part}]}) != key({"messages": [{"role": "user", "other": "x"}]})
    assert key({"messages": part}) != key({"messages": "x"})


def test_streaming_does_not_count() -> None:
    """The fields `stream` and `stream_options` of a request do not change its key."""
    plain = key(chat())
    assert key(chat(stream=True)) == key(chat(stream=False)) == plain
    assert key(chat(stream=True, stream_options={"include_usage": True})) == plain
    assert key({"messages": [{"role": "user", "stream": True}]}) != key({"messages": [{"role": "user"}]})


def test_every_turn_of_a_conversation_counts() -> None:
    """Every turn of a conversation, with its place, name and tool results, changes the key."""
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}

    def conversation(result: str = "1", call_id: str = "c1", **last: Any) -> Json:
        return {
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call_id, "content": result, **last},
            ]
        }

    assert key(conversation("1")) != key(conversation("2"))
    assert key(conversation(call_id="c1")) != key(conversation(call_id="c2"))
    assert key(conversation(name="a")) != key(conversation(name="b"))
    turns = conversation()["messages"]
    assert key({"messages": turns}) != key({"messages": turns[::-1]})
    assert key({"messages": turns}) != key({"messages": turns[:2]})
    assert key({"messages": turns}) != key({"messages": [turns[0], turns[1] | {"tool_calls": []}, turns[2]]})


def test_families_have_different_keys() -> None:
    """One body sent to two endpoints gives two keys."""
    assert key({"prompt": "x"}, family="completions") != key({"prompt": "x"}, family="chat.completions")


def test_tenants_have_different_keys() -> None:
    """Requests of two tenants have ids that begin with their different namespaces."""
    mine, yours = key(chat(), namespace_for("Bearer a")), key(chat(), namespace_for("Bearer b"))
    assert mine.id != yours.id
    assert mine.namespace == namespace_for("Bearer a") == namespace_of(mine.variant(3).id)
    assert namespace_for("Bearer a") != namespace_for("Bearer a ")
    assert namespace_for("") == "public"
    assert namespace_for("public") != "public"
    assert "Bearer" not in namespace_for("Bearer a")
    assert namespace_for("\udcff") != namespace_for("\udcfe")


def test_a_namespace_with_a_dot_is_refused() -> None:
    """A namespace with a dot raises ValueError."""
    with pytest.raises(ValueError, match=r"namespace 'a\.b'"):
        key(chat(), "a.b")


def test_variants_have_ids_of_their_own() -> None:
    """Each variant of a key has its own id, and the first one has the id of the key."""
    plain = key(chat())
    ids = [plain.variant(number).id for number in range(12)]
    assert ids[0] == plain.id
    assert len(set(ids)) == 12
    assert {plain.variant(number).proof for number in range(12)} == {plain.proof}


@pytest.mark.parametrize("depth", [50, 5_000])
@pytest.mark.parametrize("bracket", ["list", "object"])
def test_deep_nesting_has_a_key_or_is_a_recursion_error(depth: int, bracket: str) -> None:
    """A deeply nested body has a key or raises RecursionError."""
    nested: Any = 1
    for _ in range(depth):
        nested = [nested] if bracket == "list" else {"a": nested}
    if depth < 100:
        assert key(chat(x=nested)) != key(chat(x=[nested]))
    else:
        with pytest.raises(RecursionError):
            key(chat(x=nested))
    assert key(chat()) == key(chat())


SAMPLE = (
    b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"h\\u00e9"}]}],"temperature":0.0,'
    b'"seed":18446744073709551617,"top_p":0.9,"tools":[{"b":null,"a":[true,-1]}],"stream":true}'
)
# Entries outlive the process that wrote them: another key for the same request loses every one of them. Where that
# is wanted, say so in the changelog.
SAMPLE_ID = "public.e3cab77158ade8f510bb3f6ed2976479"
SAMPLE_PROOF = "1c5dcf371bfc7f20f8e46e597d38d700"


def test_the_key_of_a_request_never_changes() -> None:
    """The key of a pinned request is the one of earlier releases."""
    found = key(msgspec.json.decode(SAMPLE))
    assert (found.id, found.proof.hex()) == (SAMPLE_ID, SAMPLE_PROOF)


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_another_process_makes_the_same_key(seed: str) -> None:
    """The key does not depend on the hash seed of the process."""
    script = (
        "import sys, msgspec; from cache.entries.key import request_key\n"
        "key = request_key('public', 'chat.completions', msgspec.json.decode(sys.stdin.buffer.read()))\n"
        "print(key.id, key.proof.hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=SAMPLE,
        capture_output=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    assert done.stdout.decode().split() == [SAMPLE_ID, SAMPLE_PROOF]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user", "u"),
        ("safety_identifier", "u"),
        ("metadata", {"session": "1"}),
        ("client_metadata", {"session": "1"}),
        ("prompt_cache_key", "1"),
        ("prompt_cache_retention", "24h"),
        ("store", False),
        ("n", 1),
    ],
)
def test_who_asks_and_in_which_session_makes_no_difference(field: str, value: Any) -> None:
    """A label of the request, or one answer said in words, gives the key of the request without it."""
    assert key(chat(**{field: value})) == key(chat())
    assert key({"messages": [{"role": "user", "content": "hi", field: value}]}) != key(
        {"messages": [{"role": "user", "content": "hi"}]}
    )


@pytest.mark.parametrize("n", [2, 0, True, 1.5, "1"])
def test_another_number_of_answers_is_another_request(n: Any) -> None:
    """Any `n` but the number 1 is part of the key."""
    assert key(chat(n=n)) != key(chat())


def test_a_marker_on_the_body_or_a_call_makes_no_difference() -> None:
    """A breakpoint for the whole request, or on a call of a tool, is not part of the key."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    marked = {"messages": [{"role": "assistant", "tool_calls": [call | MARKER]}]} | MARKER
    assert key(marked) == key({"messages": [{"role": "assistant", "tool_calls": [call]}]})
