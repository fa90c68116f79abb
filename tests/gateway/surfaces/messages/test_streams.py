"""A stream says what the answer says, in the order that Anthropic's API has, whether it is made, written or read."""

import contextlib
import json
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from cache.entries.answer import StreamAssembler, stream_of
from cache.errors import UnstorableAnswer
from gateway.errors import UpstreamDisconnected
from gateway.http.sse import EventSplitter
from gateway.surfaces.messages.surface import MessagesSurface
from gateway.surfaces.surface import ChatRequest
from tests.cache.entries.test_answer_round_trip import long_texts, optional, texts, unknown_fields, usages
from tests.gateway.surfaces.messages.answer_examples import chat_answers, inputs, messages

Json = dict[str, Any]

SURFACE = MessagesSurface()
ASKED = ChatRequest({}, stream=True)
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BASE = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def events_of(stream: bytes) -> list[Json]:
    """The events of a stream, each of which says its type twice."""
    events = []
    for frame in EventSplitter().feed(stream):
        name, data, *rest = frame.decode().split("\n")
        assert rest == ["", ""]
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def in_order(stream: bytes) -> list[str]:
    """What happens in a stream, after a check that it happens as the API describes it: block after block."""
    events = events_of(stream)
    for event in events:
        EVENTS.validate_python(event)
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    index, open_block = -1, False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not open_block
            index, open_block = index + 1, True
        assert open_block
        assert event["index"] == index
        open_block = event["type"] != "content_block_stop"
    assert not open_block
    return kinds


def recorded(stream: bytes) -> Json:
    assembler = SURFACE.assembler()
    for event in EventSplitter().feed(stream):
        assembler.add(event)
    return assembler.answer()


def translated(chunks: list[Json]) -> tuple[bytes, Json]:
    """The stream for these chunks, and its whole answer."""
    translator = SURFACE.translator(ASKED, "public.0123")
    stream = b"".join(translator.add(chunk) for chunk in chunks) + translator.finish()
    return stream, translator.answer


def assembled(chunks: list[Json]) -> Json:
    assembler = StreamAssembler()
    for chunk in chunks:
        assembler.add(chunk)
    return assembler.response()


def chunk(delta: Json, finish: str | None = None, **fields: Any) -> Json:
    return {**BASE, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **fields}


def call(index: int, arguments: str, **named: str) -> Json:
    """A delta with a piece of a tool call; with `named` it is the first one."""
    function = {"arguments": arguments, **({"name": named["name"]} if named else {})}
    first = {"id": named["id"], "type": "function"} if named else {}
    return {"tool_calls": [{"index": index, **first, "function": function}]}


# A message as a stream, and back


@given(messages)
@settings(max_examples=60, deadline=None)
def test_a_message_comes_back_from_its_stream(message: Json) -> None:
    """Every block, count and unknown field is in the stream of a message, and is read from it."""
    before = json.dumps(message, sort_keys=True)
    assert json.dumps(recorded(SURFACE.own_stream(message, ASKED)), sort_keys=True) == before


@given(chat_answers())
@settings(max_examples=50, deadline=None)
def test_a_chat_completion_comes_back_from_the_stream_of_its_message(answer: Json) -> None:
    """A stored answer that is replayed to a client of Messages is a stream as their API has it, and loses nothing."""
    message = SURFACE.own_answer(answer, ASKED, "public.0123")
    stream = SURFACE.own_stream(message, ASKED)
    in_order(stream)
    assert recorded(stream) == message


# Chunks as they arrive


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """The text in pieces, cut anywhere."""
    borders = sorted(draw(st.sets(st.integers(0, len(text)), max_size=4)) | {0, len(text)})
    return [text[start:end] for start, end in zip(borders, [*borders[1:], len(text)], strict=True)]


arguments = inputs.map(json.dumps) | texts
reasoning_names = st.sampled_from(["reasoning_content", "reasoning"])


@st.composite
def usual_deltas(draw: st.DrawFn) -> list[Json]:
    """Thoughts, then text, then calls, as most servers stream them."""
    name = draw(reasoning_names)
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{name: piece} for piece in draw(cut(draw(long_texts)))]
    if draw(st.booleans()):
        signed = {"type": "thinking", "thinking": "", "signature": draw(texts)}
        deltas = [
            {**delta, "thinking_blocks": [{"type": "thinking", "thinking": delta[name], "signature": ""}]}
            if name in delta
            else delta
            for delta in deltas
        ]
        deltas.append({"thinking_blocks": [signed]})
    deltas += [{"content": piece} for piece in draw(cut(draw(long_texts)))]
    for index in range(draw(st.integers(0, 3))):
        first, *pieces = draw(cut(draw(arguments)))
        deltas.append(call(index, first, id=f"c{index}", name="f"))
        deltas += [call(index, piece) for piece in pieces]
    return deltas


@st.composite
def mixed_deltas(draw: st.DrawFn) -> list[Json]:
    """Texts, thoughts and calls in any order, pieces of one call among those of another."""
    queues = [[{"content": piece} for piece in draw(cut(draw(long_texts)))]]
    queues.append([{"reasoning_content": piece} for piece in draw(cut(draw(long_texts)))])
    for index in range(draw(st.integers(0, 3))):
        first, *pieces = draw(cut(json.dumps(draw(inputs))))
        queues.append([call(index, first, id=f"c{index}", name="f"), *(call(index, piece) for piece in pieces)])
    deltas = []
    while queues := [queue for queue in queues if queue]:
        deltas.append(draw(st.sampled_from(queues)).pop(0))
    return deltas


@st.composite
def streams(draw: st.DrawFn, deltas: st.SearchStrategy[list[Json]]) -> list[Json]:
    """Chunks with these deltas, a reason to finish and, maybe, the usage."""
    made = [{**chunk(delta), **draw(unknown_fields)} for delta in draw(deltas)]
    made.append(chunk({}, draw(st.sampled_from(["stop", "length", "tool_calls"]))))
    made[-1]["choices"][0] |= draw(optional(stop_reason=texts | st.integers(0, 9), logprobs=st.none()))
    if draw(st.booleans()):
        made.append({**BASE, "choices": [], "usage": draw(usages)})
    return made


@given(streams(usual_deltas()))
@settings(max_examples=60, deadline=None)
def test_a_stream_is_that_of_the_whole_answer(chunks: list[Json]) -> None:
    """What a client assembles from the events is the message of the whole chat completion."""
    before = json.dumps(chunks)
    stream, answer = translated(chunks)
    assert json.dumps(chunks) == before, "the chunks were changed"
    in_order(stream)
    assert recorded(stream) == answer
    assert answer == SURFACE.own_answer(assembled(chunks), ASKED, "public.0123")


@given(streams(mixed_deltas()))
@settings(max_examples=60, deadline=None)
def test_a_mixed_stream_says_the_same(chunks: list[Json]) -> None:
    """Text after a call is another block, mixed calls come one after the other, and nothing is lost or said twice."""
    stream, answer = translated(chunks)
    in_order(stream)
    assert recorded(stream) == answer
    whole = assembled(chunks)
    assert SURFACE.chat_answer(answer) == whole
    once = SURFACE.own_answer(whole, ASKED, "public.0123")
    for name in ("text", "thinking"):
        said = ["".join(block.get(name, "") for block in message["content"]) for message in (answer, once)]
        assert said[0] == said[1]
    calls = [
        sorted((block["id"], json.dumps(block["input"])) for block in message["content"] if block["type"] == "tool_use")
        for message in (answer, once)
    ]
    assert calls[0] == calls[1]


@given(chat_answers())
@settings(max_examples=50, deadline=None)
def test_any_answer_that_is_streamed_is_kept(answer: Json) -> None:
    """Whatever a server sends in a stream, in whichever field, comes back from the message."""
    assume("index" not in json.dumps(answer["choices"][0]["message"]))
    frames = stream_of(answer, include_usage=True).split(b"\n\n")[:-2]
    chunks = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    stream, message = translated(chunks)
    in_order(stream)
    assert recorded(stream) == message
    assert SURFACE.chat_answer(message) == assembled(chunks)


def deltas_in(stream: bytes) -> list[Json]:
    return [event["delta"] for event in events_of(stream) if event["type"] == "content_block_delta"]


def test_pieces_are_sent_as_they_arrive() -> None:
    """Text, and the arguments of a call, do not wait for the rest of the answer."""
    translator = SURFACE.translator(ASKED, "public.0123")
    assert [event["type"] for event in events_of(translator.add(chunk({"role": "assistant"})))] == ["message_start"]
    assert deltas_in(translator.add(chunk({"content": "He"}))) == [{"type": "text_delta", "text": "He"}]
    assert deltas_in(translator.add(chunk({"content": "y"}))) == [{"type": "text_delta", "text": "y"}]
    translator.add(chunk(call(0, "", id="c0", name="f")))
    assert deltas_in(translator.add(chunk(call(0, '{"a":')))) == [{"type": "input_json_delta", "partial_json": '{"a":'}]
    assert deltas_in(translator.add(chunk(call(0, "1}")))) == [{"type": "input_json_delta", "partial_json": "1}"}]
    second = events_of(translator.add(chunk(call(1, "{", id="c1", name="g"))))
    assert [event["type"] for event in second] == ["content_block_stop", "content_block_start", "content_block_delta"]


def test_mixed_calls_come_one_after_the_other() -> None:
    """A piece of a second call waits until the arguments of the first are whole."""
    stream, answer = translated(
        [
            chunk(call(0, '{"a": "}', id="c0", name="f")),
            chunk(call(1, '{"b":', id="c1", name="g")),
            chunk({"content": "Wait."}),
            chunk(call(0, '\\"}"}')),
            chunk(call(1, "2}")),
            chunk({}, "tool_calls"),
        ]
    )
    in_order(stream)
    assert answer["content"] == [
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": '}"}'}},
        {"type": "tool_use", "id": "c1", "name": "g", "input": {"b": 2}},
        {"type": "text", "text": "Wait."},
    ]


def test_text_after_a_call_is_another_block() -> None:
    """The order in which a model speaks and calls is kept."""
    stream, answer = translated(
        [chunk({"content": "a"}), chunk(call(0, "{}", id="c", name="f")), chunk({"content": "b"}), chunk({}, "stop")]
    )
    in_order(stream)
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "text"]


def test_signed_thoughts_in_a_stream() -> None:
    """A signature belongs to the thoughts before it, redacted thoughts are a block, and no thought is told twice."""
    first, second = ({"type": "thinking", "thinking": text, "signature": ""} for text in ("ab", "c"))
    signed = {"type": "thinking", "thinking": "", "signature": "c2ln"}
    redacted = {"type": "redacted_thinking", "data": "ZGF0YQ=="}
    stream, answer = translated(
        [
            chunk({"reasoning_content": "ab", "thinking_blocks": [first]}),
            chunk({"thinking_blocks": [signed]}),
            chunk({"thinking_blocks": [redacted]}),
            chunk({"reasoning_content": "c", "thinking_blocks": [second]}),
            chunk({"thinking_blocks": [signed]}),
            chunk({"content": "x"}, "stop"),
        ]
    )
    in_order(stream)
    assert answer["content"] == [
        {"type": "thinking", "thinking": "ab", "signature": "c2ln"},
        redacted,
        {"type": "thinking", "thinking": "c", "signature": "c2ln"},
        {"type": "text", "text": "x"},
    ]


def test_an_empty_answer() -> None:
    """An answer without any text is a message without blocks, even where no chunk came."""
    stream, answer = translated([chunk({"role": "assistant", "content": ""}), chunk({}, "stop")])
    assert in_order(stream) == ["message_start", "message_delta", "message_stop"]
    assert (answer["content"], answer["stop_reason"]) == ([], "end_turn")
    stream, answer = translated([])
    assert in_order(stream) == ["message_start", "message_delta", "message_stop"]
    assert answer["id"] == "msg_public.0123"


def test_a_first_chunk_without_names_and_other_choices() -> None:
    """Azure's first chunk names nothing, and a choice beside the first is no part of the message's text."""
    other = {"index": 1, "delta": {"content": "no"}, "finish_reason": "stop"}
    stream, answer = translated(
        [
            {**BASE, "id": "", "model": "", "choices": [], "prompt_filter_results": []},
            chunk({"content": "yes"}, "stop"),
            {**BASE, "choices": [other]},
        ]
    )
    assert recorded(stream) == answer
    assert (answer["id"], answer["model"]) == ("msg_chatcmpl-1", "m")
    assert answer["content"] == [{"type": "text", "text": "yes"}]


def test_a_chunk_that_is_an_error() -> None:
    """What is no chunk of an answer is no part of a message."""
    with pytest.raises(UpstreamDisconnected):
        SURFACE.translator(ASKED, "public.0123").add({"error": {"message": "x"}, "choices": []})


names = st.sampled_from(
    [
        *("choices", "delta", "index", "content", "tool_calls", "function", "arguments", "name", "id", "model"),
        *("reasoning", "thinking_blocks", "type", "thinking", "signature", "refusal", "usage", "finish_reason"),
    ]
)
anything = st.recursive(
    st.none() | st.integers(-1, 1) | st.sampled_from(["", "{", "thinking", "redacted_thinking", "text"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(names, anything, max_size=4) | anything.map(lambda said: chunk({"content": said}))))
@settings(max_examples=60, deadline=None)
def test_any_chunk_is_translated_or_refused(chunks: list[Json]) -> None:
    """Whatever a server sends, a client gets a stream of a message, or an error."""
    with contextlib.suppress(UpstreamDisconnected):
        stream, answer = translated(chunks)
        in_order(stream)
        assert SURFACE.chat_answer(answer) == assembled(chunks)


# A stream of a server that has Messages


def sse(*events: Json) -> list[bytes]:
    return [b"event: %b\ndata: %b\n\n" % (one["type"].encode(), json.dumps(one).encode()) for one in events]


def start(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def piece(index: int, kind: str, **fields: Any) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def stop(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}


MESSAGE: Json = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {"input_tokens": 5, "output_tokens": 1, "service_tier": "standard"},
}
BEGIN = {"type": "message_start", "message": MESSAGE}
FINISH = {
    "type": "message_delta",
    "delta": {"stop_reason": "end_turn", "stop_sequence": None, "container": {"id": "c", "expires_at": "x"}},
    "usage": {"output_tokens": 9, "input_tokens": None, "server_tool_use": {"web_search_requests": 1}},
    "context_management": {"applied_edits": []},
}
STOP = {"type": "message_stop"}
CITATION = {"type": "char_location", "cited_text": "a", "document_index": 0}


def answer_of(*events: Json) -> Json:
    assembler = SURFACE.assembler()
    for event in sse(*events):
        assembler.add(event)
    assert assembler.done == any(event["type"] in ("message_stop", "error") for event in events)
    return assembler.answer()


def test_a_native_stream_is_recorded() -> None:
    """Each kind of delta of Anthropic's API becomes a part of the message, as one that was not streamed has it."""
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    answer = answer_of(
        BEGIN,
        {"type": "ping"},
        start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        piece(0, "thinking_delta", thinking="H"),
        piece(0, "thinking_delta", thinking="m"),
        piece(0, "signature_delta", signature="c2ln"),
        stop(0),
        start(1, {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}),
        piece(1, "input_json_delta", partial_json=""),
        piece(1, "input_json_delta", partial_json='{"que'),
        piece(1, "input_json_delta", partial_json='ry": "x"}'),
        stop(1),
        start(2, result),
        stop(2),
        {"type": "some_later_event", "index": 9},
        start(3, {"type": "text", "text": "", "citations": []}),
        piece(3, "citations_delta", citation=CITATION),
        piece(3, "text_delta", text="Yes"),
        piece(3, "text_delta", text="."),
        stop(3),
        start(4, {"type": "compaction", "content": None}),
        piece(4, "compaction_delta", content="c", encrypted_content="e"),
        stop(4),
        start(5, {"type": "tool_use", "id": "t", "name": "now", "input": {}}),
        piece(5, "input_json_delta", partial_json=""),
        stop(5),
        FINISH,
        STOP,
    )
    assert answer == {
        **MESSAGE,
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "c2ln"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            result,
            {"type": "text", "text": "Yes.", "citations": [CITATION]},
            {"type": "compaction", "content": "c", "encrypted_content": "e"},
            {"type": "tool_use", "id": "t", "name": "now", "input": {}},
        ],
        "stop_reason": "end_turn",
        "container": {"id": "c", "expires_at": "x"},
        "context_management": {"applied_edits": []},
        "usage": {
            "input_tokens": 5,
            "output_tokens": 9,
            "service_tier": "standard",
            "server_tool_use": {"web_search_requests": 1},
        },
    }


def test_a_message_that_another_model_went_on_with_is_that_models() -> None:
    """The last fallback names the model that served the answer, as the answer of a plain request does."""
    fallback = {"type": "fallback", "from": {"model": "claude"}, "to": {"model": "other"}, "trigger": {}}
    assert answer_of(BEGIN, start(0, fallback), stop(0), FINISH, STOP)["model"] == "other"


def test_what_follows_the_end_is_nothing() -> None:
    """vLLM ends its streams of messages with [DONE] as well."""
    assembler = SURFACE.assembler()
    for event in [*sse(BEGIN, FINISH, STOP), b"data: [DONE]\n\n", b": comment\n\n"]:
        assembler.add(event)
    assert assembler.answer()["stop_reason"] == "end_turn"


TEXT = {"type": "text", "text": ""}


@pytest.mark.parametrize(
    "events",
    [
        [],
        [BEGIN],
        [BEGIN, FINISH],
        [FINISH, STOP],
        [BEGIN, STOP],
        [BEGIN, {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}],
        [BEGIN, {"type": "error", "error": {}}, FINISH, STOP],
        [BEGIN, start(0, TEXT), FINISH, STOP],
        [BEGIN, start(1, TEXT), stop(1), FINISH, STOP],
        [BEGIN, start(0, TEXT), stop(0), piece(0, "text_delta", text="x"), FINISH, STOP],
        [BEGIN, piece(0, "text_delta", text="x"), FINISH, STOP],
        [BEGIN, start(0, TEXT), piece(0, "text_delta", text=5), stop(0), FINISH, STOP],
        [BEGIN, start(0, TEXT), piece(0, "later_delta", text="x"), stop(0), FINISH, STOP],
        [BEGIN, start(0, TEXT), piece(0, "thinking_delta"), stop(0), FINISH, STOP],
        [BEGIN, start(0, {"type": "text", "text": 5}), piece(0, "text_delta", text="x"), stop(0), FINISH, STOP],
        [BEGIN, start(0, {}), stop(0), FINISH, STOP],
        [{"type": "message_start"}, FINISH, STOP],
        [{"type": "message_start", "message": {}}, FINISH, STOP],
        [BEGIN, {"type": "message_delta"}, STOP],
    ],
)
def test_a_stream_that_is_not_whole_is_not_stored(events: list[Json]) -> None:
    """A stream that was cut, has an error or makes no sense is no answer, and no fault of the gateway."""
    with pytest.raises(UnstorableAnswer):
        answer_of(*events)


@given(st.data(), messages)
@settings(max_examples=50, deadline=None)
def test_a_cut_stream_is_not_stored(data: st.DataObject, message: Json) -> None:
    """No part of a stream is taken for the whole."""
    events = EventSplitter().feed(SURFACE.own_stream(message, ASKED))
    assembler = SURFACE.assembler()
    for event in events[: data.draw(st.integers(0, len(events) - 1))]:
        assembler.add(event)
    with pytest.raises(UnstorableAnswer):
        assembler.answer()


@pytest.mark.parametrize("event", [b"data: {\n\n", b"data: []\n\n", b"data: \xff\n\n", b'data: {"type": []}\n\n'])
def test_an_event_that_is_no_event(event: bytes) -> None:
    """Bytes that are no event of a message leave no whole message."""
    assembler = SURFACE.assembler()
    assembler.add(event)
    with pytest.raises(UnstorableAnswer):
        assembler.answer()


event_names = st.sampled_from(
    [*("type", "index", "content_block", "delta", "message", "usage", "text", "input", "citations", "to", "model")]
)
event_types = st.sampled_from(
    [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"),
        *("message", "text", "tool_use", "thinking", "text_delta", "input_json_delta", "citations_delta", "fallback"),
    ]
)
event_values = st.recursive(
    st.none() | st.just(0) | event_types,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(event_names, inner, max_size=5),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(event_names, event_values, max_size=5)))
@settings(max_examples=60, deadline=None)
def test_any_event_is_recorded_or_refused(events: list[Json]) -> None:
    """Whatever a server sends, the answer is whole or is not stored."""
    assembler = SURFACE.assembler()
    for event in (BEGIN, *events, FINISH, STOP):
        assembler.add(b"data: %b\n\n" % json.dumps(event).encode())
    with contextlib.suppress(UnstorableAnswer):
        answer = assembler.answer()
        assert recorded(SURFACE.own_stream(answer, ASKED)) == answer
