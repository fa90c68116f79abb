"""Frames between gateways and the process of the semantic cache."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.entries.generations import Purge
from cache.semantic.messages import (
    MAX_FRAME,
    AnswerStored,
    EntryDeleted,
    HitDiscarded,
    LookupHit,
    LookupMiss,
    LookupRequest,
    Note,
    Purged,
    RefreshRequested,
    Refused,
    Reply,
    Request,
    Stats,
    StatsRequest,
    WrongAnswerReport,
    WrongAnswerResult,
    frame,
    from_gateway,
    from_service,
    read_frame,
)

SAID: list[Request | Note] = [
    LookupRequest("public.b", "How?", 0.5, key="public.a", serve=True),
    WrongAnswerReport("public.a"),
    StatsRequest(),
    AnswerStored(3, "public.a", "public.b", "How?", "m", "0.0.0", 1e8, 1e9, b"{}"),
    HitDiscarded("public.a"),
    RefreshRequested("public.a"),
    EntryDeleted("public.a"),
    Purged(Purge("model", "m", "0")),
]
REPLIED: list[Reply] = [
    LookupHit(1, 0.9, None, layer="normalized", entry="public.a", created=1.5, audit=False),
    LookupMiss(2, 0.5, 0.1, "public.a", 1.5, "numbers"),
    WrongAnswerResult(True, 2),
    Stats({"entries": 1, "policy": {"delta": 0.01}}),
    Refused("no"),
]


async def payload_of(data: bytes) -> bytes:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    payload = await read_frame(reader)
    assert payload is not None
    return payload


@pytest.mark.parametrize("message", SAID)
async def test_a_message_of_a_gateway_arrives_as_it_was(message: Request | Note) -> None:
    """A message of a gateway is decoded with its number and every field."""
    assert from_gateway(await payload_of(frame(7, message))) == (7, message)


@pytest.mark.parametrize("message", REPLIED)
async def test_a_message_of_the_service_arrives_as_it_was(message: Reply) -> None:
    """A message of the service is decoded with its number and every field."""
    assert from_service(await payload_of(frame(7, message))) == (7, message)


@pytest.mark.parametrize("end", [b"", b"\0\0", b"\0\0\0\x09half"])
async def test_frames_are_read_until_the_connection_ends(end: bytes) -> None:
    """One that is cut by the end is none."""
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(frame(number, message) for number, message in enumerate(SAID)) + end)
    reader.feed_eof()
    for number, message in enumerate(SAID):
        payload = await read_frame(reader)
        assert payload is not None
        assert from_gateway(payload) == (number, message)
    assert await read_frame(reader) is None


async def test_a_frame_above_the_size_limit_is_refused() -> None:
    """A frame above the size limit raises ValueError from its length alone."""
    with pytest.raises(ValueError, match="a frame of"):
        await payload_of((MAX_FRAME + 1).to_bytes(4, "big"))


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
