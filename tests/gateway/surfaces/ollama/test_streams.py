"""Streams: lines of JSON made of any chunks of a chat completion, and recorded from an Ollama."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ollama import ChatResponse

from cache.entries.answer import StreamAssembler, stream_of
from cache.errors import UnstorableAnswer
from gateway.errors import UpstreamTimeout
from gateway.http.sse import EventSplitter, event_data, event_json
from gateway.surfaces.ollama.chat import OllamaChatSurface
from gateway.surfaces.ollama.endpoint import OllamaSurface
from gateway.surfaces.ollama.generate import OllamaGenerateSurface
from gateway.surfaces.surface import ChatRequest, Json
from tests.gateway.surfaces.ollama.examples import chat_answers, own_answers, quick, texts, tokens, unknown, usages

CHAT, GENERATE = OllamaChatSurface(lambda: 0), OllamaGenerateSurface(lambda: 0)
NOTHING = ChatRequest({})

head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "m"}
_deltas = st.fixed_dictionaries({}, optional={"role": st.just("assistant"), "content": texts, "reasoning": texts})
_logprobs = st.none() | st.builds(lambda content: {"content": content}, st.lists(tokens, max_size=3))
_pieces = st.tuples(_deltas, _logprobs)


def chunk(delta: Json, **choice: Any) -> Json:
    return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}]}


@st.composite
def chat_streams(draw: st.DrawFn) -> list[Json]:
    """Chunks of a chat completion: thinking, text, several calls in pieces, a second choice, logprobs, usage."""
    chunks = [chunk(delta, logprobs=logprobs) for delta, logprobs in draw(st.lists(_pieces, max_size=6))]
    for number in range(draw(st.integers(0, 3))):
        pieces = draw(st.sampled_from([['{"a": ', "1}"], ["{}"], [""], ['{"b":', ' [1, {"c": null}]', "}"], ["[1]"]]))
        call: Json = {"index": number, "id": f"call_{number}", "type": "function", "function": {"name": "f"}}
        calls = [call, *({"index": number, "function": {"arguments": piece}} for piece in pieces)]
        chunks += [chunk({"tool_calls": [piece]}) for piece in calls]
    if draw(st.booleans()):
        chunks.insert(0, {**head, "choices": [{"index": 1, "delta": {"content": "Another answer"}}], **draw(unknown)})
    chunks.append(chunk({}, finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"]))))
    if draw(st.booleans()):
        chunks.append({**head, "choices": [], "usage": draw(usages)})
    return chunks


def translated(surface: OllamaSurface, chunks: list[Json]) -> tuple[Json, bytes]:
    translator = surface.translator(NOTHING, "public.1")
    body = b"".join(map(translator.add, chunks)) + translator.finish()
    return translator.answer, body


def assembled(surface: OllamaSurface, body: bytes) -> Json:
    assembler = surface.assembler()
    for line in body.splitlines(keepends=True):
        assert not assembler.done
        assembler.add(line)
    assert assembler.done
    return assembler.answer()


def lines_of(body: bytes) -> list[Json]:
    return [msgspec.json.decode(line) for line in body.splitlines()]


@pytest.mark.parametrize("surface", [CHAT, GENERATE], ids=lambda surface: surface.family)
@quick
@given(chunks=chat_streams())
def test_a_stream_says_what_the_whole_answer_says(surface: OllamaSurface, chunks: list[Json]) -> None:
    """However it is cut into chunks; its lines put together are the answer again."""
    whole = StreamAssembler()
    for piece in chunks:
        whole.add(piece)
    answer, body = translated(surface, chunks)

    assert answer == surface.own_answer(whole.response(), NOTHING, "public.1")
    assert assembled(surface, body) == answer
    assert surface.chat_answer(answer) == whole.response()


@quick
@given(chunks=chat_streams())
def test_each_line_is_one_that_ollama_sends(chunks: list[Json]) -> None:
    """Whole calls, thinking and text with the role, the text in order, and counts on the last line alone."""
    answer, body = translated(CHAT, chunks)
    lines = [ChatResponse.model_validate(line) for line in lines_of(body)]
    message = answer["message"]

    assert [line.done for line in lines] == [*[False] * (len(lines) - 1), True]
    assert all(line.message.role == "assistant" and line.created_at == "2023-11-14T22:13:20Z" for line in lines)
    assert "".join(line.message.content or "" for line in lines) == message["content"]
    assert "".join(line.message.thinking or "" for line in lines) == message.get("thinking", "")
    calls = [call for line in lines for call in line.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [
        c["function"]["arguments"] for c in message.get("tool_calls", [])
    ]
    assert all(line.total_duration is None for line in lines[:-1])
    assert lines[-1].total_duration == 0


def test_text_is_sent_as_it_arrives() -> None:
    """Each delta is a line at once; a chunk without text, such as that of the role, is none."""
    translator = CHAT.translator(NOTHING, "public.1")
    lines = [
        translator.add(chunk(d)) for d in ({"role": "assistant", "content": ""}, {"reasoning": "Hm"}, {"content": "Hi"})
    ]
    line = (
        b'{"model":"m","created_at":"2023-11-14T22:13:20Z","message":{"role":"assistant","content":%s},"done":false}\n'
    )
    assert lines == [b"", line % b'"","thinking":"Hm"', line % b'"Hi"']


def test_thinking_under_two_names_is_sent_once() -> None:
    """Some servers send both; the name that the whole answer has it from counts."""
    both = {"reasoning": "Hm", "reasoning_content": "Hm"}
    answer, body = translated(CHAT, [chunk(both), chunk({"reasoning": "!"}), chunk({"content": "Hi"})])
    assert assembled(CHAT, body) == answer
    assert answer["message"]["thinking"] == "Hm"


def test_a_completion_streams_as_a_response() -> None:
    """The chunks of a raw prompt have a text and no delta."""
    answer = {
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "text": "one two", "finish_reason": "stop"}],
    }
    chunks = [
        event_json(data)
        for data in map(event_data, EventSplitter().feed(stream_of(answer, False)))
        if data != b"[DONE]"
    ]
    own, body = translated(GENERATE, chunks)
    assert (own["response"], lines_of(body)[0]["response"]) == ("one two", "one two")
    assert GENERATE.chat_answer(own) == answer


def test_a_stream_measures_its_durations() -> None:
    """The time to the first chunk is that of the prompt, the rest that of the answer."""
    clock: Iterator[int] = count(100, 10)
    translator = OllamaChatSurface(lambda: next(clock)).translator(NOTHING, "public.1")
    translator.add(chunk({"content": "Hi"}))
    translator.add(chunk({}, finish_reason="stop"))
    last = msgspec.json.decode(translator.finish())
    assert [last[f"{name}_duration"] for name in ("total", "load", "prompt_eval", "eval")] == [20, 0, 10, 10]


@pytest.mark.parametrize("error", [{"message": "out of memory"}, "out of memory"], ids=str)
def test_an_error_of_the_upstream_ends_the_stream(error: Any) -> None:
    """It is the last line, in Ollama's form, and nothing follows."""
    translator = CHAT.translator(NOTHING, "public.1")
    translator.add(chunk({"content": "Hi"}))
    assert translator.add({"error": error}) == b'{"error":"out of memory"}\n'
    assert translator.add(chunk({"content": "!"})) + translator.finish() == b""


@pytest.mark.parametrize("strange", [{}, {"choices": None}, {"type": "ping"}, {"choices": ["x"]}], ids=str)
def test_what_is_no_chunk_says_nothing(strange: Json) -> None:
    """Servers send such things between chunks."""
    answer, _ = translated(CHAT, [chunk({"content": "Hi"}), strange, chunk({}, finish_reason="stop")])
    assert answer["message"]["content"] == "Hi"


_any: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, 0, 1, -1.5, "x", []]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["index", "delta", "text", "content", "reasoning", "tool_calls", "function", "logprobs"]),
            inner,
            max_size=3,
        )
    ),
)


@quick
@given(st.lists(st.fixed_dictionaries({"choices": st.lists(_any, max_size=2) | _any}, optional={"usage": _any})))
def test_chunks_of_any_types_are_lines_or_nothing(chunks: list[Json]) -> None:
    """Whatever an upstream sends, the stream ends as Ollama's do."""
    for surface in (CHAT, GENERATE):
        _, body = translated(surface, [{**part, "created": 1, "model": None} for part in chunks])
        assert lines_of(body)[-1].keys() & {"done", "error"}


@pytest.mark.parametrize("surface", [CHAT, GENERATE], ids=lambda surface: surface.family)
@quick
@given(data=st.data())
def test_a_replayed_answer_is_the_answer(surface: OllamaSurface, data: st.DataObject) -> None:
    """An answer of Ollama's or a translated one, cut into lines and put together."""
    native = data.draw(own_answers(message=surface is CHAT))
    for answer in (native, surface.own_answer(data.draw(chat_answers()), NOTHING, "public.1")):
        assert assembled(surface, surface.own_stream(answer, NOTHING)) == answer


def test_a_long_answer_is_replayed_in_pieces() -> None:
    """A display shows it word by word, and a very long one does not become too many lines."""
    answer = {"model": "m", "created_at": "2025-01-01T00:00:00Z", "response": "ab " * 100_000, "done": True}
    lines = lines_of(GENERATE.own_stream(answer, NOTHING))
    assert len(lines) == 257
    assert lines[0]["response"].startswith("ab ab")
    assert lines[-1]["response"] == ""


def test_a_stream_of_ollama_is_recorded() -> None:
    """As Ollama writes it: with thinking first, calls before the end, logprobs by line, and no message at the end."""
    body = (
        b'{"model":"m","created_at":"2025-01-01T00:00:00.1Z","message":{"role":"assistant","content":"","thinking":"H"},"done":false}\n'
        b'{"model":"m","created_at":"2025-01-01T00:00:00.2Z","message":{"role":"assistant","content":"","thinking":"m"},"done":false}\n'
        b'{"model":"m","created_at":"2025-01-01T00:00:00.3Z","message":{"role":"assistant","content":"a"},"logprobs":[{"token":"a","logprob":-1}],"done":false}\n'
        b'{"model":"m","created_at":"2025-01-01T00:00:00.3Z","message":{"role":"assistant","content":"b"},"logprobs":[{"token":"b","logprob":-2}],"done":false}\n'
        b'{"model":"m","created_at":"2025-01-01T00:00:00.4Z","message":{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":{}}}]},"done":false}\n'
        b"\n"
        b'{"model":"m","created_at":"2025-01-01T00:00:00.5Z","done":true,"done_reason":"stop","eval_count":4}\n'
    )
    answer = assembled(CHAT, body)
    assert answer == {
        "model": "m",
        "created_at": "2025-01-01T00:00:00.5Z",
        "message": {
            "role": "assistant",
            "content": "ab",
            "thinking": "Hm",
            "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
        },
        "logprobs": [{"token": "a", "logprob": -1}, {"token": "b", "logprob": -2}],
        "done": True,
        "done_reason": "stop",
        "eval_count": 4,
    }
    assert CHAT.own_answer(CHAT.chat_answer(answer), NOTHING, "public.1") == answer


@pytest.mark.parametrize(
    "last",
    [b'{"error":"out of memory"}', b'{"message":', b"[1]", b"\xff", b'{"done":false}', b"[" * 100_000, b""],
    ids=lambda last: repr(last[:20]),
)
def test_a_stream_that_is_not_whole_is_not_stored(last: bytes) -> None:
    """An error, what is no line, and the lack of a last line."""
    assembler = CHAT.assembler()
    assembler.add(b'{"message":{"role":"assistant","content":"a"},"done":false}\n')
    assembler.add(last + b"\n")
    assert not assembler.done
    with pytest.raises(UnstorableAnswer):
        assembler.answer()


@quick
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["message", "logprobs", "tool_calls", "done", "x"]),
            st.none() | st.lists(st.none()) | st.booleans() | st.dictionaries(texts, texts),
        ),
        max_size=4,
    )
)
def test_lines_of_any_types_are_recorded_or_refused(lines: list[Json]) -> None:
    """There is no other exception."""
    for surface in (CHAT, GENERATE):
        assembler = surface.assembler()
        for line in lines:
            assembler.add(msgspec.json.encode(line))
        try:
            surface.chat_answer(assembler.answer())
        except UnstorableAnswer:
            continue


def test_errors_have_the_form_that_clients_read() -> None:
    """A text, alone or as a line."""
    error = UpstreamTimeout("It took too long.", param="model")
    assert CHAT.error_body(error) == b'{"error":"It took too long."}'
    assert CHAT.error_event(error) == b'{"error":"It took too long."}\n'
    assert CHAT.stream_type == "application/x-ndjson"
