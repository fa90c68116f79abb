"""Streams of the Responses API: translated chunk by chunk, replayed from a whole answer, and recorded."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from cache.entries.answer import StreamAssembler, stream_of
from cache.errors import UnstorableAnswer
from gateway.errors import InternalError, UpstreamDisconnected
from gateway.http.sse import EventSplitter, event_data, event_json
from tests.gateway.surfaces.responses.examples import (
    SURFACE,
    asked,
    chats,
    chunk_streams,
    copied,
    events_of,
    natives,
    tidy_chats,
)
from tests.gateway.surfaces.responses.test_answers import chat, wild

Json = dict[str, Any]

ANY_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXTS = {"output_text": "text", "reasoning_text": "text", "refusal": "refusal", "summary_text": "text"}
ARGUMENTS = {"function_call": "arguments", "custom_tool_call": "input"}


def translated(chunks: Iterable[Json]) -> tuple[list[Json], Json]:
    translator = SURFACE.translator(asked(stream=True), "entry")
    stream = b"".join([translator.add(chunk) for chunk in chunks])
    return events_of(stream + translator.finish()), translator.answer


def assembled(chunks: Iterable[Json]) -> Json:
    assembler = StreamAssembler()
    for chunk in chunks:
        assembler.add(chunk)
    return SURFACE.own_answer(assembler.response(), asked(stream=True), "entry")


def recorded(stream: bytes) -> Json:
    assembler = SURFACE.assembler()
    for event in EventSplitter().feed(stream):
        assembler.add(event)
    return assembler.answer()


def replayed(events: list[Json]) -> list[Json]:
    """The output as a client makes it of the events, by the numbers of items and parts alone."""
    output: dict[int, Json] = {}
    for event in events:
        kind = event["type"]
        index = event.get("output_index", -1)
        if kind == "response.output_item.added":
            assert index == len(output)
            output[index] = copied(event["item"])
        elif kind.endswith("part.added"):
            name, place = place_of(event)
            assert place == len(output[index][name])
            output[index][name].append(copied(event["part"]))
        elif kind.endswith(".delta"):
            assert event["item_id"] == output[index]["id"]
            assert event["delta"] or event["logprobs"]
            if output[index]["type"] in ARGUMENTS:
                output[index][ARGUMENTS[output[index]["type"]]] += event["delta"]
            else:
                name, place = place_of(event)
                part = output[index][name][place]
                part[TEXTS[part["type"]]] += event["delta"]
                part.get("logprobs", []).extend(event.get("logprobs", []))
        elif kind == "response.output_text.done":
            part = output[index]["content"][event["content_index"]]
            assert part["logprobs"] in ([], event["logprobs"]), "those of the deltas are those of the text"
            part["logprobs"] = copied(event["logprobs"])
        elif kind == "response.output_text.annotation.added":
            part = output[index]["content"][event["content_index"]]
            assert event["annotation_index"] == len(part["annotations"])
            part["annotations"].append(event["annotation"])
    return [output[index] for index in sorted(output)]


def place_of(event: Json) -> tuple[str, int]:
    if "summary_index" in event:
        return "summary", event["summary_index"]
    return "content", event["content_index"]


def without_bytes(output: list[Json]) -> list[Json]:
    """Output without what its events do not tell before the item is done: status, and bytes of tokens."""
    output = [{name: value for name, value in item.items() if name != "status"} for item in copied(output)]
    for part in (part for item in output for part in item.get("content") or ()):
        for token in part.get("logprobs") or ():
            for one in (token, *token["top_logprobs"]):
                one.pop("bytes", None)
    return output


def expected_types(output: list[Json]) -> list[str]:
    """OpenAI's events for these items, one after the other, each run of deltas as one."""
    types = ["response.created", "response.in_progress"]
    for item in output:
        types.append("response.output_item.added")
        if item["type"] in ARGUMENTS:
            name = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}
            said = [f"response.{name[item['type']]}.delta"] if item[ARGUMENTS[item["type"]]] else []
            types += [*said, f"response.{name[item['type']]}.done"]
        for part in item.get("content") or ():
            said = [f"response.{part['type']}.delta"] if part[TEXTS[part["type"]]] else []
            cited = ["response.output_text.annotation.added" for _ in part.get("annotations") or ()]
            done = [f"response.{part['type']}.done", "response.content_part.done"]
            types += ["response.content_part.added", *said, *cited, *done]
        types.append("response.output_item.done")
    return types


def types_of(events: list[Json]) -> list[str]:
    types: list[str] = []
    for event in events:
        if not (event["type"].endswith(".delta") and types and types[-1] == event["type"]):
            types.append(event["type"])
    return types


@given(chunk_streams(tidy_chats(), shuffled=False))
@settings(max_examples=80, deadline=None)
def test_a_stream_has_openais_events_in_openais_order(chunks: list[Json]) -> None:
    """Chunks of a chat completion become OpenAI's events, each item done before the next, in the SDK's types."""
    events, answer = translated(chunks)
    end = "response.incomplete" if answer["status"] == "incomplete" else "response.completed"
    assert types_of(events) == [*expected_types(answer["output"]), end]
    for event in events:
        ANY_EVENT.validate_python(event)
    assert replayed(events) == without_status(answer["output"], events)


def without_status(output: list[Json], events: list[Json]) -> list[Json]:
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    return [
        {**item, "status": begun["status"]} if "status" in item else item
        for item, begun in zip(output, added, strict=True)
    ]


@given(chunk_streams(chats() | tidy_chats(), shuffled=True))
@settings(max_examples=80, deadline=None)
def test_a_stream_in_any_order_ends_with_the_answer(chunks: list[Json]) -> None:
    """However fields and calls come interleaved, the answer is that of the assembled chunks, and each item is done."""
    events, answer = translated(chunks)
    assert answer == assembled(chunks)
    assert events[0]["response"]["id"] == events[1]["response"]["id"] == answer["id"]
    assert events[-1]["response"] == answer
    done = {e["item"]["id"]: e["item"] for e in events if e["type"] == "response.output_item.done"}
    assert done == {item["id"]: item for item in answer["output"]}
    said = {item["id"]: item for item in replayed(events)}
    for item in answer["output"]:
        if item["type"] in ARGUMENTS:
            assert said[item["id"]][ARGUMENTS[item["type"]]] == item[ARGUMENTS[item["type"]]]
        else:
            parts = {part["type"]: part for part in said[item["id"]]["content"]}
            for part in item["content"]:
                assert parts[part["type"]][TEXTS[part["type"]]] == part[TEXTS[part["type"]]]


@given(chats())
@settings(max_examples=80, deadline=None)
def test_chunks_of_a_replay_give_the_answer_they_were_cut_from(answer: Json) -> None:
    """A chat completion that is streamed by another gateway gives the same Response as a plain one."""
    chunks = [event_json(event_data(event)) for event in EventSplitter().feed(stream_of(answer, True))[:-1]]
    events, own = translated(chunks)
    whole = {name: value for name, value in answer.items() if name != "usage" or value is not None}
    assert own == SURFACE.own_answer(whole, asked(stream=True), "entry")
    assert events[-1]["response"] == own


def test_text_and_arguments_arrive_as_the_upstream_sends_them() -> None:
    """Each chunk gives its events at once, with the log probabilities of its tokens."""
    translator = SURFACE.translator(asked(stream=True), "e")
    base = {"id": "c", "created": 1, "model": "m"}

    def deltas(delta: Json, **choice: Any) -> list[Json]:
        chunk = {**base, "choices": [{"index": 0, "delta": delta, **choice}]}
        events = [event_json(event_data(event)) for event in EventSplitter().feed(translator.add(chunk))]
        return [event for event in events if event["type"].endswith(".delta")]

    token = {
        "token": "a",
        "logprob": -1.0,
        "bytes": [97],
        "top_logprobs": [{"token": "b", "logprob": -2, "bytes": None}],
    }
    assert deltas({"role": "assistant", "content": ""}) == []
    assert [event["delta"] for event in deltas({"reasoning": "hm"})] == ["hm"]
    (event,) = deltas({"content": "a"}, logprobs={"content": [token]})
    assert event["delta"] == "a"
    assert event["logprobs"] == [{"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -2}]}]
    function = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert deltas({"tool_calls": [function]}) == []
    for piece in ('{"a', '":1}'):
        (event,) = deltas({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
        assert (event["type"], event["delta"]) == ("response.function_call_arguments.delta", piece)


def test_interleaved_calls_are_told_apart() -> None:
    """Arguments of parallel calls go to their own items, whichever of them comes next."""

    def piece(index: int, text: str, **begun: Any) -> Json:
        call = {"index": index, **begun, "function": {"arguments": text, **({"name": "f"} if begun else {})}}
        return {"id": "c", "created": 1, "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}

    begun: Json = {"type": "function"}
    chunks = [piece(0, '{"a":', id="x", **begun), piece(1, '{"b":', id="y", **begun), piece(0, "1}"), piece(1, "2}")]
    events, answer = translated(chunks)
    assert [item["arguments"] for item in replayed(events)] == ['{"a":1}', '{"b":2}']
    assert [item["call_id"] for item in answer["output"]] == ["x", "y"]
    assert [event["output_index"] for event in events if event["type"].endswith(".delta")] == [0, 1, 0, 1]


def test_a_call_waits_for_its_id_and_name() -> None:
    """A call is announced when its id and name are known, so that they do not change."""
    pieces: list[Json] = [
        {"function": {"arguments": "{"}},
        {"id": "x", "function": {"name": "f"}},
        {"function": {"arguments": "}"}},
    ]
    chunks = [{"choices": [{"delta": {"tool_calls": [{"index": 0, **piece}]}}]} for piece in pieces]
    events, answer = translated(chunks)
    (added,) = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert (added["call_id"], added["name"]) == ("x", "f")
    assert answer["output"][0]["arguments"] == "{}"
    assert types_of(events) == [*expected_types(answer["output"]), "response.completed"]


def test_an_item_that_begins_at_the_end_does_not_end_another_one_again() -> None:
    """A call without a name is told at the end, after a message whose parts came in another order than theirs."""
    call = {"index": 0, "id": "", "type": "custom", "custom": {"name": "", "input": ""}}
    deltas: list[Json] = [{"refusal": "no"}, {"content": "well"}, {"tool_calls": [call]}]
    events, answer = translated({"choices": [{"index": 0, "delta": delta}]} for delta in deltas)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == answer["output"]


def test_an_answer_that_says_nothing_is_an_empty_text() -> None:
    """An answer that a stop string ended at once has a message with an empty text."""
    chunks = [{"id": "c", "created": 1, "choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}]
    events, answer = translated(chunks)
    assert answer["output"][0]["content"][0]["text"] == ""
    assert types_of(events) == [*expected_types(answer["output"]), "response.completed"]


def test_a_stream_without_choices_at_first_has_the_id_that_comes_later() -> None:
    """The first event waits for a chunk with a choice: some servers name the answer only there."""
    named = {"id": "c", "created": 1, "model": "m"}
    chunks: list[Json] = [
        {"id": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": []},
        {**named, "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]},
    ]
    events, answer = translated(chunks)
    assert answer == assembled(chunks)
    assert events[0]["response"]["id"] == answer["id"]
    assert events[0]["response"]["model"] == "m"


@given(natives())
@settings(max_examples=80, deadline=None)
def test_a_native_answer_that_comes_as_chunks_is_whole(response: Json) -> None:
    """A Response that an upstream gateway streamed as a chat completion is that Response again, in events."""
    answer = SURFACE.chat_answer(response)
    chunks = [event_json(event_data(event)) for event in EventSplitter().feed(stream_of(answer, True))[:-1]]
    events, own = translated(chunks)
    assert own == response
    assert events[0]["response"]["id"] == events[-1]["response"]["id"] == response["id"]


@given(natives())
@settings(max_examples=80, deadline=None)
def test_a_whole_answer_becomes_a_stream(response: Json) -> None:
    """A Response with items of all kinds becomes events that make it again, and that are recorded as it was."""
    stream = SURFACE.own_stream(response, asked(stream=True))
    events = events_of(stream)
    assert without_bytes(replayed(events)) == without_bytes([with_empty_lists(item) for item in response["output"]])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    assert recorded(stream) == response


def with_empty_lists(item: Json) -> Json:
    """An output text always has logprobs in its events."""
    if item["type"] != "message":
        return item
    parts = [{**p, "logprobs": p.get("logprobs") or []} if p["type"] == "output_text" else p for p in item["content"]]
    return {**item, "content": parts}


@given(tidy_chats())
@settings(max_examples=40, deadline=None)
def test_a_replay_has_the_events_of_a_stream(answer: Json) -> None:
    """A hit is streamed with the events of a computed answer, all in the SDK's types."""
    own = SURFACE.own_answer(answer, asked(stream=True), "e")
    events = events_of(SURFACE.own_stream(own, asked(stream=True)))
    end = "response.incomplete" if own["status"] == "incomplete" else "response.completed"
    assert types_of(events) == [*expected_types(own["output"]), end]
    for event in events:
        ANY_EVENT.validate_python(event)


def ended(stream: bytes) -> tuple[bool, str]:
    """Whether the assembler says that the stream is over, and why it cannot be stored."""
    assembler = SURFACE.assembler()
    for event in EventSplitter().feed(stream):
        assembler.add(event)
    with pytest.raises(UnstorableAnswer) as raised:
        assembler.answer()
    return assembler.done, str(raised.value)


def test_a_stream_that_is_not_whole_cannot_be_stored() -> None:
    """A cut stream, one that failed and one with an error raise UnstorableAnswer."""
    own = SURFACE.own_answer(chat({"content": "hello"}), asked(), "e")
    stream = SURFACE.own_stream(own, asked())
    *begun, _ = EventSplitter().feed(stream)
    cut = b"".join(begun)
    assert ended(cut) == (False, "the stream did not end with a response")
    failed = b'event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed"}}\n\n'
    assert ended(cut + failed) == (True, "the stream carries an error")
    assert ended(cut + SURFACE.error_event(InternalError("x"))) == (True, "the stream carries an error")
    assert ended(cut + b'data: {"error": {"message": "x"}}\n\n') == (True, "the stream carries an error")
    done, why = ended(b"event: x\ndata: {\n\n" + stream)
    assert (done, "not JSON" in why) == (True, True)


def test_items_that_the_last_event_leaves_out_are_recorded() -> None:
    """The output is that of the items that were done, if the last event has none."""
    own = SURFACE.own_answer(chat({"content": "hello", "reasoning_content": "hm"}), asked(), "e")
    events = events_of(SURFACE.own_stream(own, asked()))
    assembler = SURFACE.assembler()
    for event in events:
        if event["type"] == "response.completed":
            event["response"] = {**event["response"], "output": []}
        assembler.add(f"data: {json.dumps(event)}\n\n".encode())
    assert assembler.done
    assert assembler.answer() == own


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "choices": st.lists(
                    st.fixed_dictionaries({}, optional={"delta": wild, "index": st.integers(0, 1), "logprobs": wild}),
                    max_size=2,
                )
            },
            optional={"id": wild, "created": wild, "usage": wild, "response": wild},
        ),
        max_size=4,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_chunks_are_translated_or_refused(chunks: list[Json]) -> None:
    """Any JSON in chunks gives events that end with the answer, or raises an error that clients can be told."""
    try:
        events, answer = translated(chunks)
    except UpstreamDisconnected:
        return
    assert events[-1]["response"] == answer


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["response.completed", "response.output_item.done", "error", "x"]) | wild,
                "response": wild,
                "output_index": wild,
                "item": wild,
            },
        ),
        max_size=4,
    )
)
@settings(max_examples=100, deadline=None)
def test_any_events_are_recorded_or_unstorable(events: list[Json]) -> None:
    """Any JSON in events is recorded, or raises UnstorableAnswer."""
    assembler = SURFACE.assembler()
    for event in events:
        assembler.add(b"data: " + json.dumps(event).encode() + b"\n\n")
    try:
        SURFACE.chat_answer(assembler.answer())
    except UnstorableAnswer:
        return


def test_what_is_no_chunk_is_an_error_of_the_upstream() -> None:
    """A chunk without choices raises an error that the stream can carry."""
    with pytest.raises(UpstreamDisconnected, match="not whole"):
        SURFACE.translator(asked(stream=True), "e").add({"choices": None})
