"""Parts of the wall time, of spans that are written down here."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.profiling.attribution import parts_of, phases_of, self_segments
from backend.profiling.instrumentation import BOOKKEEPING, WAITING, Recorder, Span
from backend.profiling.replay import RequestRecord


def seconds_of(recorder: Recorder, window: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """(in the sum, beside it) by part."""
    return {part.name: (part.seconds, part.beside) for part in parts_of(recorder, window)}


def test_a_span_has_the_time_that_none_within_it_has() -> None:
    """A step's own time is what is left between its parts."""
    spans = [Span("a", 0, 10), Span("b", 1, 4), Span("c", 2, 3), Span("b", 5, 6), Span("d", 12, 13)]
    assert self_segments(spans) == {
        "a": [(0, 1), (4, 5), (6, 10)],
        "b": [(1, 2), (3, 4), (5, 6)],
        "c": [(2, 3)],
        "d": [(12, 13)],
    }


def test_the_event_loop_counts_only_while_the_engine_waits() -> None:
    """What it does beside a step is not in the sum; where two things wait, the moment counts once."""
    recorder = Recorder(
        engine=[Span(WAITING, 0, 4), Span(BOOKKEEPING, 4, 9), Span("decode", 5, 8)],
        loop=[Span("tokenise", 1, 2), Span("prefix store", 1, 3), Span("tokenise", 6, 7), Span("respond", 8, 9.5)],
    )
    assert seconds_of(recorder, (0, 10)) == {
        "tokenise": (1, 1),
        "respond": (0, 1.5),
        "prefix store": (1, 1),
        "decode": (3, 0),
        BOOKKEEPING: (2, 0),
        "idle": (2, 0),
        "other": (1, 0),
    }


def test_what_lies_outside_the_window_does_not_count() -> None:
    """The engine waited before the first request arrived."""
    recorder = Recorder(engine=[Span(WAITING, -100, 1), Span("decode", 1, 3), Span(WAITING, 3, 50)])
    assert seconds_of(recorder, (0, 4)) == {"decode": (2, 0), "idle": (2, 0)}


_TIMES = st.lists(st.integers(0, 60), min_size=2, max_size=16, unique=True).map(sorted)


@given(_TIMES, _TIMES, st.data())
def test_parts_add_up_to_the_wall_time(engine: list[int], loop: list[int], data: st.DataObject) -> None:
    """Whatever the two threads did, no moment counts twice, and none is left out."""
    names = st.sampled_from([WAITING, "decode", "sampling"])
    spans = [Span(data.draw(names), a, b) for a, b in zip(engine[::2], engine[1::2], strict=False)]
    others = [Span(data.draw(st.sampled_from(["tokenise", "respond"])), a, b) for a, b in pairwise(loop)]
    parts = parts_of(Recorder(engine=spans, loop=others), (10, 50))
    assert sum(part.seconds for part in parts) == pytest.approx(40)
    assert all(part.seconds >= 0 and part.beside >= 0 for part in parts)
    covered = sum(max(0, min(50, span.end) - max(10, span.start)) for span in spans)
    other = sum(part.seconds for part in parts if part.name == "other")
    assert other == pytest.approx(40 - covered)


def test_phases_add_up_to_the_time_of_a_request() -> None:
    """From its arrival to its end."""
    record = RequestRecord("one", 1, tokenised=2, queued=2.5, started=4, token_times=[7, 8, 9], ended=9.5)
    phases = phases_of([record])
    assert (phases.tokenise, phases.prefix_store, phases.queue, phases.prefill) == (1, 0.5, 1.5, 3)
    assert (phases.decode, phases.finish, phases.total) == (2, 0.5, 8.5)
