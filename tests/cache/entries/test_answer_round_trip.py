"""A replayed stream loses nothing: what it assembles to is the answer it was cut from."""

import contextlib
import gc
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.entries.answer import DONE, StreamAssembler, check_complete, stream_of, usage_of
from cache.errors import UnstorableAnswer

Json = dict[str, Any]

# What JSON can say: no lone surrogates, and integers that every parser reads alike.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
long_texts = st.one_of(texts, st.text(st.characters(exclude_categories=["Cs"]), min_size=60, max_size=400))
scalars = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts.filter(lambda t: t != "index"), inner, max_size=3)
    ),
    max_leaves=6,
)
STANDARD = {
    *("id", "object", "created", "model", "system_fingerprint", "service_tier", "choices", "usage", "error"),
    *("obfuscation", "index", "message", "delta", "text", "finish_reason", "logprobs", "role", "content", "name"),
    *("refusal", "tool_calls", "reasoning_content", "reasoning", "type"),
}
unknown_fields = st.dictionaries(texts.filter(lambda name: name not in STANDARD), values, max_size=2)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional=fields)


def merged(*parts: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    return st.tuples(*parts).map(lambda dicts: {name: value for part in dicts for name, value in part.items()})


tool_calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": texts,
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": texts, "arguments": long_texts}),
        },
        optional={"extra_content": values},
    ),
    max_size=3,
)
tokens = st.fixed_dictionaries(
    {
        "token": texts,
        "logprob": st.floats(-50, 0),
        "bytes": st.none() | st.lists(st.integers(0, 255), max_size=4),
        "top_logprobs": st.lists(st.fixed_dictionaries({"token": texts, "logprob": st.floats(-50, 0)}), max_size=2),
    }
)
chat_logprobs = st.fixed_dictionaries(
    {"content": st.none() | st.lists(tokens, max_size=4)},
    optional={"refusal": st.none() | st.lists(tokens, max_size=2), "note": texts, "count": st.integers(0, 9)},
)
messages = merged(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none() | long_texts}),
    optional(
        refusal=st.none() | texts,
        reasoning_content=st.none() | long_texts,
        reasoning=long_texts,
        tool_calls=st.none() | tool_calls,
        annotations=st.lists(st.fixed_dictionaries({"type": texts, "url_citation": values}), max_size=2),
        function_call=st.fixed_dictionaries({"name": texts, "arguments": texts}),
        audio=st.fixed_dictionaries({"id": texts, "data": texts, "expires_at": st.integers(0, 2**31)}),
    ),
    unknown_fields,
)
reasons = st.sampled_from(["stop", "length", "tool_calls", "function_call"])


@st.composite
def chat_choices(draw: st.DrawFn, index: int) -> Json:
    choice: Json = {"index": index, "message": draw(messages), "finish_reason": draw(reasons)}
    shape = draw(st.sampled_from(["absent", "null", "any", "spells the content"]))
    if shape == "null":
        choice["logprobs"] = None
    elif shape == "any":
        choice["logprobs"] = draw(chat_logprobs)
    elif shape == "spells the content":
        spelled = draw(st.lists(tokens, min_size=1, max_size=5))
        choice["message"]["content"] = "".join(str(token["token"]) for token in spelled)
        choice["logprobs"] = {**draw(chat_logprobs), "content": spelled}
    return {**choice, **draw(unknown_fields)}


@st.composite
def text_choices(draw: st.DrawFn, index: int) -> Json:
    choice: Json = {"index": index, "text": draw(long_texts), "finish_reason": draw(reasons)}
    if draw(st.booleans()):
        choice["logprobs"] = draw(
            st.none()
            | st.fixed_dictionaries(
                {
                    "tokens": st.lists(texts, max_size=4),
                    "token_logprobs": st.lists(st.none() | st.floats(-50, 0), max_size=4),
                    "text_offset": st.lists(st.integers(0, 99), max_size=4),
                    "top_logprobs": st.lists(st.none() | st.dictionaries(texts, st.floats(-9, 0)), max_size=4),
                }
            )
        )
    return {**choice, **draw(unknown_fields)}


usages = st.fixed_dictionaries(
    {"prompt_tokens": st.integers(0, 9999), "completion_tokens": st.integers(0, 9999), "total_tokens": st.integers(0)},
    optional={
        "prompt_tokens_details": st.none() | st.fixed_dictionaries({"cached_tokens": st.integers(0, 99)}),
        "completion_tokens_details": st.fixed_dictionaries({"reasoning_tokens": st.integers(0, 99)}),
    },
)


@st.composite
def responses(draw: st.DrawFn) -> Json:
    is_chat = draw(st.booleans())
    make = chat_choices if is_chat else text_choices
    response: Json = {
        "id": draw(texts),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": draw(st.integers(0, 2**40)),
        "model": draw(texts),
        "choices": [draw(make(index)) for index in range(draw(st.integers(1, 3)))],
        **draw(optional(usage=usages, system_fingerprint=st.none() | texts, service_tier=st.none() | texts)),
        **draw(unknown_fields),
    }
    return response


def chunks_of(stream: bytes) -> list[Json]:
    assert stream.endswith(DONE)
    frames = stream.removesuffix(DONE).split(b"\n\n")
    assert frames.pop() == b""
    assert all(frame.startswith(b"data: ") for frame in frames)
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def assembled(chunks: list[Json]) -> Json:
    assembler = StreamAssembler()
    for chunk in chunks:
        assembler.add(chunk)
    return assembler.response()


@given(responses())
@settings(max_examples=150, deadline=None)
def test_a_replayed_stream_assembles_to_the_answer_it_came_from(response: Json) -> None:
    """Reasoning, tool calls, refusal, logprobs, usage details, every choice and every unknown field come back."""
    before = json.dumps(response)
    chunks = chunks_of(stream_of(response, include_usage=True))
    copies = json.dumps(chunks)
    assert assembled(chunks) == response
    assert json.dumps(response) == before, "the answer was changed"
    assert json.dumps(chunks) == copies, "the chunks were changed"


@given(responses())
@settings(max_examples=40, deadline=None)
def test_usage_is_sent_only_where_it_is_asked_for(response: Json) -> None:
    """A replay has usage only with include_usage, and then on a last chunk without choices."""
    *others, last = chunks_of(stream_of(response, include_usage=True))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
    assert last["choices"] == []
    assert last["usage"] == response.get("usage")
    plain = chunks_of(stream_of(response, include_usage=False))
    assert all("usage" not in chunk and chunk["choices"] for chunk in plain)
    assert assembled(plain) == {field: value for field, value in response.items() if field != "usage"}


@given(responses())
@settings(max_examples=40, deadline=None)
def test_a_replay_looks_like_a_stream_of_its_server(response: Json) -> None:
    """Each chunk of a replay names the answer, and each choice has its finish reason on its last piece."""
    chunks = chunks_of(stream_of(response, include_usage=True))
    kind = "chat.completion.chunk" if response["object"] == "chat.completion" else "text_completion"
    assert {chunk["object"] for chunk in chunks} == {kind}
    for field in ("id", "created", "model"):
        assert all(chunk[field] == response[field] for chunk in chunks)
    for choice in response["choices"]:
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        reasons = [piece["finish_reason"] for piece in pieces]
        assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
        if kind != "text_completion":
            assert pieces[0]["delta"]["role"] == "assistant"


json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(STANDARD)) | texts, inner, max_size=4)
    ),
    max_leaves=6,
)
wild_chunks = st.fixed_dictionaries(
    {},
    optional={
        "choices": json_values | st.lists(st.dictionaries(st.sampled_from(sorted(STANDARD)), json_values, max_size=5)),
        "usage": json_values,
        "object": json_values,
        "x": json_values,
    },
)


@given(st.lists(wild_chunks, max_size=4))
@settings(max_examples=80, deadline=None)
def test_any_json_from_a_server_is_assembled_or_unstorable(chunks: list[Json]) -> None:
    """Any JSON from a server is assembled or raises UnstorableAnswer."""
    with contextlib.suppress(UnstorableAnswer):
        response = assembled(chunks)
        usage_of(response)
        check_complete(response)


def test_a_long_answer_takes_linear_time() -> None:
    """Assembling and replaying an answer take time in proportion to its chunks."""

    def seconds(count: int) -> float:
        piece = {
            "choices": [{"index": 0, "delta": {"content": "word "}, "logprobs": {"content": [{"token": "word "}]}}]
        }
        best = float("inf")
        for _ in range(3):
            begun = time.process_time()
            assembler = StreamAssembler()
            for _ in range(count):
                assembler.add(piece)
            response = assembler.response()
            assert len(response["choices"][0]["message"]["content"]) == 5 * count
            stream_of(response, include_usage=True)
            best = min(best, time.process_time() - begun)
        return best

    gc.disable()  # its passes over a growing heap are not this code's
    try:
        assert seconds(40_000) < 11 * seconds(10_000)
    finally:
        gc.enable()


@pytest.mark.parametrize("text", ["word " * 100_000, "x" * 500_000, "a " + "b" * 300_000, "é\u2028\r\n" * 20_000])
def test_a_long_text_is_cut_into_few_pieces(text: str) -> None:
    """A replay of a long text has fewer than a thousand chunks."""
    message = {"role": "assistant", "content": text}
    response = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    chunks = chunks_of(stream_of(response, include_usage=False))
    assert len(chunks) < 1000
    assert assembled(chunks)["choices"] == response["choices"]
