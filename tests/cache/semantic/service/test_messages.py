"""Frames between gateways and the process of the semantic cache."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.messages import (
    MAX_FRAME,
    AnswerStored,
    EntryDeleted,
    Frames,
    HitDiscarded,
    LookupHit,
    LookupMiss,
    LookupRequest,
    Note,
    Purged,
    Question,
    RefreshRequested,
    Refused,
    Reply,
    Stats,
    StatsRequest,
    WrongAnswerReport,
    WrongAnswerResult,
    frame,
    from_gateway,
    from_service,
)

SAID: list[Question | Note] = [
    LookupRequest("public.a", "public.b", "How?", 0.5, True),
    WrongAnswerReport("public.a"),
    StatsRequest(),
    AnswerStored(3, "public.a", "public.b", "How?", "m", "0.0.0", 1e8, 1e9, b"{}"),
    HitDiscarded("public.a"),
    RefreshRequested("public.a"),
    EntryDeleted("public.a"),
    Purged("model", "m"),
]
REPLIED: list[Reply] = [
    LookupHit(1, 0.9, None, layer="normalized", entry="public.a", created=1.5, audit=False),
    LookupMiss(2, 0.5, 0.1, "public.a", 1.5, "numbers"),
    WrongAnswerResult(True, 2),
    Stats({"entries": 1, "policy": {"delta": 0.01}}),
    Refused("no"),
]


@pytest.mark.parametrize("message", SAID)
def test_a_message_of_a_gateway_arrives_as_it_was(message: Question | Note) -> None:
    """A message of a gateway is decoded with its number and every field."""
    (payload,) = Frames().feed(frame(7, message))
    assert from_gateway(payload) == (7, message)


@pytest.mark.parametrize("message", REPLIED)
def test_a_message_of_the_service_arrives_as_it_was(message: Reply) -> None:
    """A message of the service is decoded with its number and every field."""
    (payload,) = Frames().feed(frame(7, message))
    assert from_service(payload) == (7, message)


@given(st.lists(st.integers(0, len(SAID) - 1), max_size=8), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_frames_arrive_however_they_are_cut(chosen: list[int], cuts: list[int]) -> None:
    """Frames are decoded however the stream is cut."""
    stream = b"".join(frame(number, SAID[which]) for number, which in enumerate(chosen))
    frames, arrived, start = Frames(), [], 0
    for number in range(len(stream)):
        size = cuts[number % len(cuts)]
        arrived += [from_gateway(payload) for payload in frames.feed(stream[start : start + size])]
        start += size
        if start >= len(stream):
            break
    assert arrived == [(number, SAID[which]) for number, which in enumerate(chosen)]


def test_a_frame_above_the_size_limit_is_refused() -> None:
    """A frame above the size limit raises ValueError from its length alone."""
    with pytest.raises(ValueError, match="a frame of"):
        Frames().feed((MAX_FRAME + 1).to_bytes(4, "big"))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    """Bytes are decoded only to messages of their own direction, or refused."""
    for read, own in ((from_gateway, SAID), (from_service, REPLIED)):
        try:
            number, message = read(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        assert type(message) in {type(each) for each in own}
        assert isinstance(number, int)
