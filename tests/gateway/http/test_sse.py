"""Events are parsed for any cuts of the bytes, in linear time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.sse import EventSplitter, LineSplitter, NotAnEvent

EVENT = b'data: {"a":"\xc3\xbc"}'


def split(chunks: list[bytes]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    events = [event for chunk in chunks for event in splitter.feed(chunk)]
    return events, splitter.rest


@given(
    breaks=st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=1, max_size=8),
    rest=st.sampled_from([b"", b"data: half", b"data: half\n"]),
    cuts=st.sets(st.integers(0, 200)),
)
def test_events_do_not_depend_on_how_the_bytes_are_cut(breaks: list[bytes], rest: bytes, cuts: set[int]) -> None:
    """Events are the same for any line ends and any cuts of the bytes."""
    sent = b"".join(EVENT + end + end for end in breaks) + rest
    ends = sorted(cut for cut in cuts if cut < len(sent))
    chunks = [sent[start:end] for start, end in zip([0, *ends], [*ends, len(sent)], strict=True)]
    events, left = split(chunks)

    assert b"".join(events) + left == sent
    assert events == [EVENT + end + end for end in breaks][: len(events)]
    # A lone CR at the very end may be half of a line break.
    assert len(events) >= len(breaks) - (1 if breaks[-1] == b"\r" and not rest else 0)


def seconds_for(size: int, line_break: bytes) -> float:
    chunks = [b"x" * 4096] * (size // 4096)
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        events, _rest = split([b"data: ", *chunks, line_break * 2])
        best = min(best, time.process_time() - began)
        assert len(events) == 1
    return best


def test_an_event_of_many_reads_costs_linear_time() -> None:
    """An event of many reads takes time in proportion to its bytes."""
    for line_break in (b"\n", b"\r\n"):
        assert seconds_for(2**22, line_break) < 10 * seconds_for(2**20, line_break)


@pytest.mark.parametrize("kind", [EventSplitter, LineSplitter])
def test_many_blank_lines_are_one_end(kind: type[EventSplitter]) -> None:
    """Megabytes of line breaks after an event belong to it, and nothing is lost."""
    splitter = kind()
    sent = [EVENT + b"\n" * 2**22, b"\n\n", EVENT + b"\n\n"]
    events = [event for data in sent for event in splitter.feed(data)]
    assert b"".join(events) + splitter.rest == b"".join(sent)
    assert len(events) <= 3


EVENTS = [
    b'data: {"a": 1}\n\n',
    b'event: x\r\ndata:{"a":\r\ndata: 1}\r\n\r\n',
    b"data: [DONE]\n\n",
    b": a comment\n\n",
    b"\xef\xbb\xbfid: 1\n\n",
    b"retry\nother-field: x\n\n",
    b"data: \n\n",
    b"\n\n",
    b'data: {"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}\n\n",
]
NO_EVENTS = [
    b"data: {broken\n\n",
    b"data: [1]\n\n",
    b"data: garbage\n\n",
    b"\x00\xfe{]\n\n",
    b"<html>\n\n",
    b": a comment\nand no field\n\n",
]


def test_what_is_an_event() -> None:
    """An event says an object or [DONE], or nothing; lines are objects. All else is none."""
    for event in EVENTS:
        EventSplitter().check(event)
    for line in (b'{"a": 1}\n', b"\n", b""):
        LineSplitter().check(line)
    for event in NO_EVENTS:
        with pytest.raises(NotAnEvent):
            EventSplitter().check(event)
    for line in (b"[1]\n", b"{broken\n", b"data: {}\n", b"\xff\n"):
        with pytest.raises(NotAnEvent):
            LineSplitter().check(line)
