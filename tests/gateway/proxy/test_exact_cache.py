"""The exact cache, end to end: a repeated request gets the first answer unchanged."""

import json
from typing import Any

import msgspec
import pytest

from gateway.upstreams.mock import Reply
from tests.gateway.client import COMPLETIONS, Answer, assemble, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import json_reply, saying

STREAM: dict[str, Any] = {"stream": True}
STREAM_WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
SHAPES: dict[str, dict[str, Any]] = {"json": {}, "stream": STREAM, "stream with usage": STREAM_WITH_USAGE}

WEATHER_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
CLOCK_CALL = {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": "{}"}}

# Parts of an answer beside plain text; each must be replayed in every shape.
MESSAGES: dict[str, dict[str, Any]] = {
    "plain text": {"content": "It is sunny, and it will stay so for the whole of the week."},
    "unicode": {"content": 'Grüße 🦊🏳️‍🌈 \u0000\u2028\u202e नमस्ते \\ " \n\r\n\n data: [DONE]'},
    "empty text": {"content": ""},
    "tool calls": {"content": None, "tool_calls": [WEATHER_CALL, CLOCK_CALL]},
    "text and tool calls": {"content": "Let me look.", "tool_calls": [WEATHER_CALL]},
    "reasoning_content": {"reasoning_content": "Think, then think again about it all.", "content": "42"},
    "reasoning": {"reasoning": "First, second, third.", "content": "42"},
    "refusal": {"content": None, "refusal": "I cannot help with that, and I am sorry for it."},
    "unknown field": {"content": "yes", "audio": {"id": "a", "data": "AAAA"}, "x_score": 0.5, "x_flag": True},
}


def response(*choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A response object of a chat."""
    usage = {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
    whole = [
        {"index": index, "logprobs": None, "finish_reason": "stop", **choice} for index, choice in enumerate(choices)
    ]
    base = {"id": "chatcmpl-7", "object": "chat.completion", "created": 1_700_000_123, "model": "mock-2026"}
    return {**base, "choices": whole, "usage": usage, **fields}


def says(message: dict[str, Any]) -> dict[str, Any]:
    """A choice with this message."""
    return {"message": {"role": "assistant", **message}}


async def ask_twice(stage: Stage, body: dict[str, Any], first: str, second: str) -> tuple[Answer, Answer]:
    """The computed answer in one shape and the cached one in another."""
    mock = await stage.mock(Reply(body=body))
    client = await stage.gateway(mock)
    computed = await client.post(chat(**SHAPES[first]))
    cached = await client.post(chat(**SHAPES[second]))
    assert computed.cache == "miss"
    assert cached.cache == "hit"
    assert len(mock.received) == 1
    return computed, cached


@pytest.mark.parametrize("second", SHAPES)
@pytest.mark.parametrize("first", ["json", "stream with usage"])
@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
async def test_every_part_of_a_message_survives_the_cache(
    stage: Stage, message: dict[str, Any], first: str, second: str
) -> None:
    """All parts of a message are replayed, for every shape of both answers."""
    computed, cached = await ask_twice(stage, response(says(message)), first, second)

    expected = computed.response["choices"][0]["message"]
    kept = cached.response["choices"][0]["message"]
    assert {f: v for f, v in kept.items() if v is not None} == {f: v for f, v in expected.items() if v is not None}
    assert {f: v for f, v in expected.items() if v is not None} == {
        f: v for f, v in {"role": "assistant", **message}.items() if v is not None
    }


@pytest.mark.parametrize("second", SHAPES)
@pytest.mark.parametrize("first", ["json", "stream with usage"])
async def test_every_choice_and_its_finish_reason_survive_the_cache(stage: Stage, first: str, second: str) -> None:
    """Each of three choices is replayed with its own text and its own finish reason."""
    choices = [
        {**says({"content": f"answer number {index}"}), "finish_reason": reason}
        for index, reason in enumerate(("stop", "length", "tool_calls"))
    ]
    _, cached = await ask_twice(stage, response(*choices), first, second)

    kept = cached.response["choices"]
    assert [choice["index"] for choice in kept] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in kept] == [f"answer number {index}" for index in range(3)]
    assert [choice["finish_reason"] for choice in kept] == ["stop", "length", "tool_calls"]


def token(text: str, *top: str) -> dict[str, Any]:
    """A token's log probability with its alternatives."""
    kept = {"token": text, "logprob": -0.25, "bytes": list(text.encode())}
    return {**kept, "top_logprobs": [{"token": t, "logprob": -1.5, "bytes": list(t.encode())} for t in top]}


LOGPROBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one for each token": (
        {"content": "Grüße"},
        {"content": [token("Grü", "Gru"), token("ße", "sse", "se")], "refusal": None},
    ),
    "tokens that are parts of a character": (
        {"content": "🦊"},
        {"content": [token("\\xf0\\x9f"), token("\\xa6\\x8a")], "refusal": None},
    ),
    "of a tool call": (
        {"content": None, "tool_calls": [WEATHER_CALL]},
        {"content": [token("<tool>")], "refusal": None},
    ),
    "of a refusal": ({"content": None, "refusal": "No."}, {"content": None, "refusal": [token("No"), token(".")]}),
    "with fields of a server's own": (
        {"content": "ab"},
        {"content": [token("a"), {**token("b"), "x_rank": 3}], "refusal": None, "x_scale": 2.0},
    ),
}


@pytest.mark.parametrize("second", SHAPES)
@pytest.mark.parametrize("first", ["json", "stream with usage"])
@pytest.mark.parametrize(("message", "logprobs"), LOGPROBS.values(), ids=LOGPROBS.keys())
async def test_logprobs_survive_the_cache(
    stage: Stage, message: dict[str, Any], logprobs: dict[str, Any], first: str, second: str
) -> None:
    """Log probabilities are replayed, every token once."""
    _, cached = await ask_twice(stage, response({**says(message), "logprobs": logprobs}), first, second)

    assert cached.response["choices"][0]["logprobs"] == logprobs


@pytest.mark.parametrize("second", ["json", "stream with usage"])
@pytest.mark.parametrize("first", ["json", "stream with usage"])
async def test_usage_details_survive_the_cache(stage: Stage, first: str, second: str) -> None:
    """Usage comes back with its details, known and unknown."""
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 12,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 7},
        "x_energy_joules": 1.5,
    }
    _, cached = await ask_twice(stage, response(says({"content": "ok"}), usage=usage), first, second)

    assert cached.response["usage"] == usage


@pytest.mark.parametrize("second", SHAPES)
@pytest.mark.parametrize("first", ["json", "stream with usage"])
async def test_fields_of_the_response_survive_the_cache(stage: Stage, first: str, second: str) -> None:
    """Id, model, creation time, fingerprint, tier and unknown fields of the response and of a choice come back."""
    fields = {
        "system_fingerprint": "fp_1",
        "service_tier": "default",
        "x_provider": {"region": "eu", "hops": [1, 2, {"three": None}]},
    }
    choice = {**says({"content": "ok"}), "stop_reason": 128_009, "x_safety": {"level": "low"}}
    _, cached = await ask_twice(stage, response(choice, **fields), first, second)

    kept = cached.response
    expected = {**fields, "id": "chatcmpl-7", "created": 1_700_000_123, "model": "mock-2026"}
    assert {name: kept[name] for name in expected} == expected
    assert kept["object"] == "chat.completion"
    assert {name: kept["choices"][0][name] for name in ("stop_reason", "x_safety")} == {
        "stop_reason": 128_009,
        "x_safety": {"level": "low"},
    }


@pytest.mark.parametrize("second", SHAPES)
@pytest.mark.parametrize("first", SHAPES)
async def test_text_completions_share_one_entry_between_shapes(stage: Stage, first: str, second: str) -> None:
    """The text, log probabilities and finish reason of a text completion come back in every shape."""
    logprobs = {
        "tokens": ["o", "k"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [None, None],
        "text_offset": [0, 1],
    }
    body = {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 1_700_000_123,
        "model": "mock",
        "choices": [{"index": 0, "text": "ok", "logprobs": logprobs, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }
    mock = await stage.mock(Reply(body=body))
    client = await stage.gateway(mock)
    await client.post({"model": "mock", "prompt": "say ok", **SHAPES[first]}, COMPLETIONS)
    cached = await client.post({"model": "mock", "prompt": "say ok", **SHAPES[second]}, COMPLETIONS)

    assert len(mock.received) == 1
    assert cached.response["object"] == "text_completion"
    choice = cached.response["choices"][0]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("ok", logprobs, "length")


async def test_a_hit_without_streaming_is_the_upstreams_body_byte_for_byte(stage: Stage) -> None:
    """A hit without streaming has the upstream's body with its spacing and order of fields."""
    body = (
        b'{ "choices" :[{"finish_reason":"stop","message":{"content":"\\u00fc\\/","role":"assistant"},"index":0}],\n'
        b'  "created":1e9, "usage":{"completion_tokens":1.0,"prompt_tokens":2}, "x":[1.50, null] }\n'
    )

    raw = await stage.raw(saying(json_reply(body)))
    client = await stage.gateway(raw)
    answers = [await client.post(chat()) for _ in range(4)]

    assert [answer.cache for answer in answers] == ["miss", "hit", "hit", "hit"]
    assert {answer.body for answer in answers} == {body}
    assert len(raw.connections) == 1


async def test_a_replayed_stream_is_well_formed(stage: Stage) -> None:
    """A replayed stream has a role first, the finish reason last, one id, and one [DONE]."""
    mock = await stage.mock(Reply(text="one two three four five six seven eight nine ten eleven twelve"))
    client = await stage.gateway(mock)
    await client.post(chat())
    hit = await client.post(chat(stream=True))

    chunks = hit.chunks
    assert hit.headers["Content-Type"].split(";")[0] == "text/event-stream"
    assert hit.body.count(b"[DONE]") == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {(c["id"], c["object"], c["model"], c["created"]) for c in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", "mock", 1_700_000_000)
    }
    assert len(chunks) > 4, "the text comes in several pieces"


async def test_a_replayed_tool_call_has_the_form_that_readers_expect(stage: Stage) -> None:
    """Each streamed tool call has its index, and its id and name on its first piece."""
    mock = await stage.mock(Reply(message={"content": None, "tool_calls": [WEATHER_CALL, CLOCK_CALL]}))
    client = await stage.gateway(mock)
    await client.post(chat())
    hit = await client.post(chat(stream=True))

    seen: dict[int, dict[str, Any]] = {}
    for chunk in hit.chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls") or ():
            if call["index"] not in seen:
                seen[call["index"]] = call
    assert [(seen[i]["id"], seen[i]["type"], seen[i]["function"]["name"]) for i in (0, 1)] == [
        ("call_1", "function", "weather"),
        ("call_2", "function", "clock"),
    ]


async def test_a_tool_call_learned_from_a_stream_has_the_form_of_a_plain_answer(stage: Stage) -> None:
    """Pieces of a call's arguments are joined, and the index that only streams have is removed."""
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None},
        {"tool_calls": [{**WEATHER_CALL, "index": 0, "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{**CLOCK_CALL, "index": 1}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Köln"}'}}]},
    ]
    mock = await stage.mock(Reply(events=chunk_events(deltas, "tool_calls")))
    client = await stage.gateway(mock)
    await client.post(chat(stream=True))
    hit = await client.post(chat())

    assert hit.cache == "hit"
    assert hit.json["choices"][0]["message"]["tool_calls"] == [WEATHER_CALL, CLOCK_CALL]
    assert hit.json["choices"][0]["finish_reason"] == "tool_calls"


async def test_interleaved_choices_of_a_stream_are_kept_apart(stage: Stage) -> None:
    """Interleaved pieces of two choices are two whole texts in the entry."""
    events: list[Any] = [
        {**CHUNK, "choices": [{"index": index, "delta": {"content": piece}, "finish_reason": None}]}
        for piece, index in (("Ja", 0), ("No", 1), (", gern", 0), (", never", 1))
    ]
    events += [{**CHUNK, "choices": [{"index": i, "delta": {}, "finish_reason": "stop"}]} for i in (1, 0)]
    mock = await stage.mock(Reply(events=[*events, "[DONE]"]))
    client = await stage.gateway(mock)
    await client.post(chat(stream=True, n=2))
    hit = await client.post(chat(n=2))

    assert hit.cache == "hit"
    assert [choice["message"]["content"] for choice in hit.json["choices"]] == ["Ja, gern", "No, never"]


CHUNK = {"id": "chatcmpl-9", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "mock"}


def chunk_events(deltas: list[dict[str, Any]], finish_reason: str = "stop") -> list[Any]:
    """The data of a stream with these deltas."""
    chunks: list[Any] = [{**CHUNK, "choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    return [*chunks, {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]}, "[DONE]"]


# Usage


@pytest.mark.parametrize("without", ["because it refuses", "because it is not asked"])
async def test_an_entry_without_usage_does_not_answer_a_stream_that_asks_for_it(stage: Stage, without: str) -> None:
    """A stream that asks for usage replaces an entry without usage by a new answer."""
    mock = await stage.mock(Reply(text="hello", refuses=("stream_options",) if without == "because it refuses" else ()))
    client = await stage.gateway(mock, cache={"ask_usage": without == "because it refuses"})
    await client.post(chat(stream=True))
    mock.replies[:] = [Reply(text="hello")]
    asking = await client.post(chat(**STREAM_WITH_USAGE))
    again = await client.post(chat(**STREAM_WITH_USAGE))

    assert asking.cache == "miss"
    assert asking.chunks[-1]["usage"]["total_tokens"] > 0
    assert again.cache == "hit"
    assert again.chunks[-1]["usage"] == asking.chunks[-1]["usage"]
    assert again.chunks[-1]["choices"] == []


async def test_a_stream_without_include_usage_carries_none(stage: Stage) -> None:
    """Usage of the entry is not sent to a stream that did not ask for it."""
    mock = await stage.mock(Reply(text="hello"))
    client = await stage.gateway(mock)
    await client.post(chat())
    hit = await client.post(chat(stream=True))

    assert hit.cache == "hit"
    assert all("usage" not in chunk for chunk in hit.chunks)
    assert all(chunk["choices"] for chunk in hit.chunks)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"x": 1}], ids=str)
async def test_usage_is_asked_for_on_behalf_of_a_stream(stage: Stage, options: dict[str, Any] | None) -> None:
    """The upstream gets `include_usage`, and the other bytes of the body as they were if it had no options."""
    mock = await stage.mock(Reply(text="hello"))
    client = await stage.gateway(mock)
    body = b'\n { "model" : "mock","stream":true, "messages":[{"role":"user","content":"\\u00e9"}],"seed":1.50 }'
    if options is None:
        await client.post(body)
        assert mock.received[0].body == body.replace(b"{", b'{"stream_options":{"include_usage":true},', 1)
        return
    await client.post(chat(stream=True, stream_options=options))
    assert mock.received[0].fields == chat(stream=True, stream_options={**options, "include_usage": True})


async def test_a_body_is_untouched_where_usage_is_not_asked_for(stage: Stage) -> None:
    """`cache.ask_usage: false`, and requests that do not stream."""
    mock = await stage.mock(Reply(text="hello"))
    client = await stage.gateway(mock, cache={"ask_usage": False})
    bodies = [msgspec.json.encode(body) for body in (chat(stream=True), chat("again"))]
    for body in bodies:
        await client.post(body)

    assert [received.body for received in mock.received] == bodies


async def test_usage_that_the_client_did_not_ask_for_is_kept_and_withheld(stage: Stage) -> None:
    """It is stored, and sent only to clients that ask for it: no chunk of the others has the field, not even null."""
    mock = await stage.mock(Reply(text="hello"))
    client = await stage.gateway(mock)
    computed = await client.post(chat(stream=True))
    plain = await client.post(chat())
    asking = await client.post(chat(**STREAM_WITH_USAGE))

    assert all(chunk["choices"] for chunk in computed.chunks)
    assert all("usage" not in chunk for chunk in computed.chunks)
    assert plain.json["usage"]["total_tokens"] > 0
    assert asking.cache == "hit"
    assert asking.chunks[-1]["usage"] == plain.json["usage"]
    assert len(mock.received) == 1


async def test_an_upstream_that_refuses_to_be_asked_for_usage_is_remembered(stage: Stage) -> None:
    """The client gets its answer from a second request, and the next stream is sent as it is at once."""
    mock = await stage.mock(Reply(text="hello", refuses=("stream_options",)))
    client = await stage.gateway(mock)
    answers = [await client.post(chat(text, stream=True)) for text in ("one", "two")]

    assert [answer.text for answer in answers] == ["hello", "hello"]
    assert ["stream_options" in received.fields for received in mock.received] == [True, False, False]


async def test_an_error_that_quotes_the_request_is_no_refusal(stage: Stage) -> None:
    """It comes to the client as the upstream says it, and the next stream is asked for usage again."""
    error = {"message": "no such model in {'stream_options': {'include_usage': True}}", "type": "invalid_request_error"}
    mock = await stage.mock(Reply(status=400, error=error))
    client = await stage.gateway(mock)
    failed = await client.post(chat(stream=True))
    mock.replies[:] = [Reply(text="hello")]
    await client.post(chat("again", stream=True))

    assert (failed.status, failed.json["error"]["message"]) == (400, error["message"])
    assert "stream_options" in mock.received[-1].fields


async def test_an_unrequested_usage_chunk_is_relayed_where_none_is_asked_for(stage: Stage) -> None:
    """With `cache.ask_usage: false` an unrequested usage chunk reaches the client unchanged."""
    events = chunk_events([{"role": "assistant", "content": "hi"}])
    events.insert(-1, {**CHUNK, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    mock = await stage.mock(Reply(events=events))
    client = await stage.gateway(mock, cache={"ask_usage": False})
    computed = await client.post(chat(stream=True))

    assert [json.loads(event) for event in computed.events[:-1]] == events[:-1]


# Which requests are one


SAME = {
    "order of fields": b'{"messages":[{"content":"hello","role":"user"}],"model":"mock","temperature":0}',
    "0 and 0.0": b'{"model":"mock","messages":[{"role":"user","content":"hello"}],"temperature":0.0}',
    "spacing": b'{ "model": "mock",\n "messages": [{"role": "user", "content": "hello"}], "temperature": 0 }',
    "escapes": b'{"model":"mock","messages":[{"role":"user","content":"h\\u0065llo"}],"temperature":0}',
    "null": b'{"model":"mock","messages":[{"role":"user","content":"hello","name":null}],"temperature":0,"seed":null}',
    "one text part": b'{"model":"mock","messages":[{"role":"user","content":[{"type":"text","text":"hello"}]}],'
    b'"temperature":0}',
    "stream false": b'{"model":"mock","messages":[{"role":"user","content":"hello"}],"temperature":0,"stream":false}',
}


@pytest.mark.parametrize("body", SAME.values(), ids=SAME.keys())
async def test_one_request_written_differently_is_one_request(stage: Stage, body: bytes) -> None:
    """Differences that cannot change the answer do not change the key."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    await client.post(chat(temperature=0))

    assert (await client.post(body)).cache == "hit"
    assert len(mock.received) == 1


@pytest.mark.parametrize(
    "field",
    [
        *("min_p", "top_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature"),
        *(
            "seed",
            "max_tokens",
            "max_completion_tokens",
            "top_logprobs",
            "best_of",
            "min_tokens",
            "x_new_next_year",
        ),
    ],
)
async def test_every_number_counts(stage: Stage, field: str) -> None:
    """A parameter with another value is another request, and so is one without it."""
    await all_differ(stage, [chat(), chat(**{field: 1}), chat(**{field: 0.5}), chat(**{field: 2})])


@pytest.mark.parametrize(
    "field",
    [
        *("guided_json", "chat_template_kwargs", "response_format", "tools", "tool_choice", "logit_bias", "extra_body"),
        *("reasoning", "prediction", "modalities", "stop", "documents", "x_new_next_year"),
    ],
)
async def test_every_structure_counts_to_its_depth(stage: Stage, field: str) -> None:
    """A difference deep inside any field makes another request."""
    values: list[Any] = [{"a": {"b": [1, {"c": 1}]}}, {"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [{"c": 1}, 1]}}]
    values += [{"a": {"b": [1, {"c": "1"}]}}, {"a": {"b": [1, {"c": True}]}}, {"a": {"b": [1, {"c": None}]}}]
    await all_differ(stage, [chat(**{field: value}) for value in values])


async def test_fields_never_run_into_each_other(stage: Stage) -> None:
    """A text never gives the key of another field, message or value."""
    user = {"role": "user", "content": "a"}
    await all_differ(
        stage,
        [
            chat("a", stop="xtemperature: 0"),
            chat("a", stop="x", temperature=0),
            chat("a", stop=["x", "y"]),
            chat("a", stop=["xy"]),
            chat("a", stop=["x,y"]),
            chat("a", stop='["x","y"]'),
            {"model": "mock", "messages": [user, user]},
            {"model": "mock", "messages": [{"role": "user", "content": "aa"}]},
            {"model": "mock", "messages": [{"role": "user", "content": "a", "name": "b"}]},
            {"model": "mock", "messages": [{"role": "system", "content": "a"}, user]},
            {"model": "mock", "messages": [{"role": "system", "content": "aa"}, {"role": "user", "content": ""}]},
            {"model": "mock2", "messages": [user]},
            chat([{"type": "text", "text": "a"}, {"type": "text", "text": "a"}]),
            chat([{"type": "input_text", "text": "a"}]),
        ],
    )


async def test_large_integers_are_not_rounded_into_one(stage: Stage) -> None:
    """Seeds that are equal as floats are different seeds."""
    await all_differ(
        stage, [chat(seed=seed) for seed in (2**53, 2**53 + 1, 2**64, 2**64 + 1, 2**80, 2**80 + 1, -(2**70))]
    )


async def test_endpoints_do_not_share_entries(stage: Stage) -> None:
    """One body sent to both endpoints is two requests."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    body = {"model": "mock", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    await client.post(body)

    assert (await client.post(body, COMPLETIONS)).cache == "miss"


async def all_differ(stage: Stage, bodies: list[dict[str, Any]]) -> None:
    mock = await stage.mock(models=("mock", "mock2"))
    client = await stage.gateway(mock)
    answers = [await client.post(body) for body in bodies]
    assert [answer.status for answer in answers] == [200] * len(bodies)
    assert [answer.cache for answer in answers] == ["miss"] * len(bodies)
    assert len({answer.entry for answer in answers}) == len(bodies)


# What may be kept


BROKEN_STREAMS: dict[str, list[Any]] = {
    "no [DONE]": chunk_events([{"content": "half"}])[:-1],
    "no finish reason": [*chunk_events([{"content": "half"}])[:-2], "[DONE]"],
    "only one of two choices finished": [
        {**CHUNK, "choices": [{"index": 1, "delta": {"content": "x"}, "finish_reason": None}]},
        *chunk_events([{"content": "half"}]),
    ],
    "an error within": [*chunk_events([{"content": "half"}])[:-2], {"error": {"message": "out of memory"}}, "[DONE]"],
    "stopped by the server": chunk_events([{"content": "half"}], "abort"),
    "an error as finish reason": chunk_events([{"content": "half"}], "error"),
    "nothing at all": ["[DONE]"],
}


@pytest.mark.parametrize("events", BROKEN_STREAMS.values(), ids=BROKEN_STREAMS.keys())
async def test_a_stream_that_is_not_whole_is_relayed_and_not_kept(stage: Stage, events: list[Any]) -> None:
    """An incomplete stream is relayed to its client and not stored."""
    mock = await stage.mock(Reply(events=events))
    client = await stage.gateway(mock)
    first, second = [await client.post(chat(stream=True)) for _ in range(2)]

    assert first.events == [e.encode() if isinstance(e, str) else msgspec.json.encode(e) for e in events]
    assert second.cache == "miss"
    assert len(mock.received) == 2


NOT_ANSWERS: dict[str, dict[str, Any]] = {
    "an error with status 200": {"error": {"message": "overloaded", "type": "server_error"}},
    "no choices": response(),
    "no finish reason": response({**says({"content": "half"}), "finish_reason": None}),
    "stopped by the server": response({**says({"content": "half"}), "finish_reason": "abort"}),
    "one choice unfinished": response(says({"content": "a"}), {**says({"content": "b"}), "finish_reason": None}),
}


@pytest.mark.parametrize("body", NOT_ANSWERS.values(), ids=NOT_ANSWERS.keys())
async def test_a_body_that_is_no_whole_answer_is_relayed_and_not_kept(stage: Stage, body: dict[str, Any]) -> None:
    """An incomplete answer is relayed unchanged and not stored."""
    mock = await stage.mock(Reply(body=body))
    client = await stage.gateway(mock)
    first, second = [await client.post(chat()) for _ in range(2)]

    assert first.json == body
    assert (first.cache, second.cache) == ("miss", "miss")
    assert len(mock.received) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked_for"),
    [("/v1/chat/completions", {"n": 2}), (COMPLETIONS, {"n": 2}), (COMPLETIONS, {"prompt": ["a", "b"]})],
    ids=["n of a chat", "n of a completion", "prompts of a batch"],
)
async def test_an_answer_with_fewer_choices_than_asked_for_is_not_kept(
    stage: Stage, path: str, asked_for: dict[str, Any], stream: bool
) -> None:
    """An answer with fewer choices than `n` is relayed and not stored."""
    mock = await stage.mock(Reply(text="one"))
    client = await stage.gateway(mock)
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    body = {**body, "model": "mock", "stream": stream, **asked_for}
    first, second = [await client.post(body, path) for _ in range(2)]

    assert (first.status, first.text) == (200, "one")
    assert (first.cache, second.cache) == ("miss", "miss")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 404, 408, 422, 429, 500, 502, 503, 529])
async def test_an_error_is_never_kept(stage: Stage, status: int, stream: bool) -> None:
    """An error is relayed with its status and body and not stored."""
    error = {"message": "no", "type": "t", "param": None, "code": "c", "x": 1}
    mock = await stage.mock(Reply(status=status, error=error, headers={"Retry-After": "7"}))
    client = await stage.gateway(mock)
    failed = await client.post(chat(stream=stream))
    mock.replies[:] = [Reply(text="better now")]
    healed = await client.post(chat(stream=stream))

    assert (failed.status, failed.json, failed.headers["Retry-After"]) == (status, {"error": error}, "7")
    assert failed.cache == "miss"
    assert (healed.status, healed.cache, healed.text) == (200, "miss", "better now")


@pytest.mark.parametrize("status", [201, 202, 203, 206])
async def test_only_status_200_is_kept(stage: Stage, status: int) -> None:
    """An answer with another 2xx status is relayed with it, and not stored."""
    mock = await stage.mock(Reply(status=status, text="hm"))
    client = await stage.gateway(mock)
    first, second = [await client.post(chat()) for _ in range(2)]

    assert (first.status, second.status, second.cache) == (status, status, "miss")


async def test_an_upstream_may_forbid_keeping(stage: Stage) -> None:
    """An answer with Cache-Control: no-store, in any spelling, is not kept."""
    mock = await stage.mock(Reply(text="secret", headers={"Cache-Control": "private, No-Store"}))
    client = await stage.gateway(mock)
    await client.post(chat())

    assert (await client.post(chat())).cache == "miss"


async def test_an_answer_longer_than_the_limit_is_relayed_and_not_kept(stage: Stage) -> None:
    """An answer longer than cache.max_answer is relayed completely and not stored."""
    mock = await stage.mock(Reply(text="word " * 100_000))
    client = await stage.gateway(mock, cache={"max_answer": 2**16})
    plain = await client.post(chat())
    streamed = await client.post(chat(stream=True))
    again = await client.post(chat())

    assert plain.text == streamed.text == "word " * 100_000
    assert (plain.cache, streamed.cache, again.cache) == ("miss", "miss", "miss")


async def test_a_disabled_cache_answers_nothing(stage: Stage) -> None:
    """Every request goes to the upstream, with bypass in the headers, where the cache is disabled."""
    mock = await stage.mock()
    client = await stage.gateway(mock, cache={"enabled": False})
    answers = [await client.post(chat()) for _ in range(2)]

    assert [answer.cache for answer in answers] == ["bypass", "bypass"]
    assert answers[1].cache_status.fwd == "bypass"
    assert len(mock.received) == 2


async def test_memory_stays_within_its_limit(stage: Stage) -> None:
    """The memory tier holds at most the configured bytes for any number of answers."""
    mock = await stage.mock(Reply(text="x" * 2_000))
    client = await stage.gateway(mock, cache={"memory": 100_000})
    for number in range(150):
        await client.post(chat(f"question {number}"))
        await client.post(chat(f"question {number}", stream=True))

    assert 50_000 < await client.figure("memory_bytes") <= 100_000
    assert 0 < await client.figure("memory_entries") < 60
    assert await client.figure("memory_evictions_total") > 90
    assert (await client.post(chat("question 149"))).cache == "hit"
    assert (await client.post(chat("question 0"))).cache == "miss"


async def test_a_replay_and_the_first_stream_give_one_answer(stage: Stage) -> None:
    """A client builds the same answer from the first stream and from a replay."""
    pieces = ["The ", "qu", "ick", " brown fox", " ", "jumps", " over 🦊", "."]
    events = chunk_events([{"role": "assistant", "content": ""}, *({"content": piece} for piece in pieces)])
    mock = await stage.mock(Reply(events=events))
    client = await stage.gateway(mock)
    computed = await client.post(chat(stream=True))
    replayed = await client.post(chat(stream=True))

    assert replayed.cache == "hit"
    expected = assemble(computed.chunks)
    kept = assemble(replayed.chunks)
    assert kept["choices"][0]["message"] == expected["choices"][0]["message"]
    assert {f: kept[f] for f in CHUNK} == {**CHUNK, "object": "chat.completion"}
