"""Messages between gateways and the process of the semantic cache."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.entries.generations import Purge
from cache.semantic.messages import (
    MAX_BODY,
    MAX_MODEL,
    MAX_TEXT,
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
    from_gateway,
    from_service,
    line_of,
)
from cache.semantic.service import server

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


@pytest.mark.parametrize("message", SAID)
def test_a_message_of_a_gateway_arrives_as_it_was(message: Request | Note) -> None:
    """A message of a gateway is decoded with its number and every field."""
    assert from_gateway(line_of(7, message)) == (7, message)


@pytest.mark.parametrize("message", REPLIED)
def test_a_message_of_the_service_arrives_as_it_was(message: Reply) -> None:
    """A message of the service is decoded with its number and every field."""
    assert from_service(line_of(7, message)) == (7, message)


@given(st.text(st.characters(codec="utf-8")), st.binary())
def test_a_message_is_one_line(text: str, body: bytes) -> None:
    """Whatever it is about, it ends at its only line feed."""
    message = AnswerStored(0, "public.a", "public.b", text, "m", "0.0.0", 1e8, 1e9, body)
    line = line_of(0, message)
    assert line.find(b"\n") == len(line) - 1
    assert from_gateway(line) == (0, message)


def test_the_longest_note_is_within_the_limit_of_a_line() -> None:
    """A question and a model of as many characters as may be, each of which JSON escapes, and the longest body."""
    text, model, name = "\0" * MAX_TEXT, "\0" * MAX_MODEL, "public." + "a" * 64
    note = AnswerStored(2**63, name, name, text, model, "0.0.0", 1e8 / 3, 1e9 / 3, b"\xff" * MAX_BODY)
    assert len(line_of(0, note)) < server._MAX_LINE


def test_the_start_of_a_message_is_none() -> None:
    """One that is cut by the end of a connection is refused."""
    line = line_of(7, SAID[0])
    for size in range(len(line) - 1):
        with pytest.raises(msgspec.DecodeError):
            from_gateway(line[:size])


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
