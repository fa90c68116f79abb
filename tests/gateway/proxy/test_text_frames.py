"""An event that differs from the one before in its text alone is recorded as if it had been decoded whole."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache.entries.answer import StreamAssembler
from cache.errors import UnstorableAnswer
from gateway.http.sse import event_data, event_json
from gateway.proxy.recorder import StreamRecorder

DONE = b"data: [DONE]\n\n"
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
NAME = (b'{"choices":[{"index":0,"delta":{"name":', b"}}]}")
OTHER_DELTA = (b'{"choices":[{"index":0,"delta":{"content":"a"}}],"delta":{"content":', b"}}")
# Around a text: as servers write them, and what must not be taken for one of these.
FRAMES = [
    (b'{"id":"a","choices":[{"index":0,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}]}'),
    (b'{"id": "a", "choices": [{"index": 0, "delta": {"content": ', b'}, "finish_reason": null}], "usage": null}'),
    (b'{"choices":[{"index":0,"delta":{"reasoning":', b"}}]}"),
    (b'{"choices":[{"index":1,"delta":{"content":', b"}}]}"),
    (b'{"choices":[{"index":0,"delta":{"role":', b"}}]}"),
    NAME,
    (b'{"choices":[{"index":0,"delta":{"content":', b',"role":"assistant"}}]}'),
    (b'{"choices":[{"index":0,"delta":{"content":', b',"content":"again"}}]}'),
    (b'{"choices":[{"index":0,"delta":{"content":"first","content":', b"}}]}"),
    (b'{"choices":[{"index":0,"delta":{"content":', b'},"logprobs":{"content":[{"token":"x"}]}}]}'),
    (b'{"choices":[{"index":0,"delta":{"content":', b'},"note":"one more"}]}'),
    (b'{"choices":[{"index":0,"delta":{"content":', b'}},{"index":1,"delta":{"content":"b"}}]}'),
    OTHER_DELTA,
    (b'{"delta":{"content":"x"},"choices":[{"index":0,"delta":{"content":', b"}}]}"),
    (b'{"choices":[{"index":0,"delta":{"tool_calls":[{"id":', b"}]}}]}"),
    (b'{"choices":[{"index":0,"delta":{"content":"a"}}],"x":', b"}"),
]
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(['"', "\\", '","delta":{"content":"', "\n", "\r\n\r\n", '"}}]}', "first", "a", "x"]),
)
QUOTED = st.one_of(
    TEXTS.map(msgspec.json.encode),
    TEXTS.map(lambda text: text.encode("unicode-escape").replace(b"\\", b"\\u005c").join([b'"', b'"'])),
    st.sampled_from([b' "a"', b'"a" ', b"null", b"7", b'"a","b":"c"', b'"\\u00fc"', b'"']),
)


def event(frame: tuple[bytes, bytes], quoted: bytes) -> bytes:
    return b"data: " + frame[0] + quoted + frame[1] + b"\n\n"


EVENTS = st.lists(st.tuples(st.sampled_from(FRAMES), st.lists(QUOTED, min_size=1, max_size=4)), max_size=5).map(
    lambda runs: [event(frame, quoted) for frame, texts in runs for quoted in texts]
)


def recorded(events: list[bytes]) -> bytes | str:
    """What the recorder makes of the events, or why nothing."""
    recorder = StreamRecorder(1, lambda event: None)
    for said in events:
        recorder.add(said)
    try:
        return recorder.finish().body
    except UnstorableAnswer as reason:
        return str(reason)


@given(EVENTS)
@example([event(NAME, b'"a"')] * 2)
@example([event(OTHER_DELTA, b'"a"'), event(OTHER_DELTA, b'"b"')])
def test_frames_change_no_answer(events: list[bytes]) -> None:
    """The recording of a stream is what the assembler makes of its chunks, each decoded whole."""
    assembler = StreamAssembler()
    events = [*events, STOP, DONE]
    try:
        for said in events[:-1]:
            assembler.add(event_json(event_data(said)))
        expected: bytes | None = msgspec.json.encode(assembler.response())
    except (ValueError, UnstorableAnswer):
        expected = None
    heard = recorded(events)
    assert heard == expected or (isinstance(heard, str) and (expected is None or "choice" in heard))


@pytest.mark.parametrize("late", [FRAMES[0], FRAMES[1]])
def test_nothing_is_recorded_after_the_end(late: tuple[bytes, bytes]) -> None:
    """An event after [DONE] is no part of the answer."""
    events = [event(late, b'"Hello"'), STOP.replace(b"{},", b'{"content":"."},'), event(late, b'" you"')]
    assert recorded([*events, DONE]) == recorded([*events, DONE, event(late, b'" late"')])
