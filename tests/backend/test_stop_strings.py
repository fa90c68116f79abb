"""A stop string ends the text before it, however the text is cut into pieces."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from backend.stop_strings import StopStrings

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    watcher = StopStrings(tuple(stops))
    released = ""
    for piece in pieces:
        text, stopped = watcher.add(piece)
        released += text
        if stopped:
            return released, True
    return released + watcher.finish(), False


@given(text=TEXT, stops=STOPS, data=st.data())
def test_pieces_do_not_matter_for_whether_it_stops(text: str, stops: list[str], data: st.DataObject) -> None:
    """One character at a time, the text ends before the stop string that is complete first."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    released, stopped = run(list(text), stops)
    assert stopped == bool(ends)
    if not ends:
        assert released == text
        return
    first_end = min(end for end, _ in ends)
    assert released == text[: min(start for end, start in ends if end == first_end)]
    # In larger pieces several stop strings may be complete at once: then the one that begins first counts.
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    bounds = [0, *cuts, len(text)]
    released, stopped = run([text[a:b] for a, b in itertools.pairwise(bounds)], stops)
    assert stopped
    assert text.startswith(released)
    assert not any(stop in released for stop in stops)


@given(text=TEXT, stops=STOPS)
def test_only_a_possible_start_is_held_back(text: str, stops: list[str]) -> None:
    """What has not been released is the beginning of a stop string, so text flows as soon as it can."""
    watcher = StopStrings(tuple(stops))
    released = ""
    for end in range(len(text)):
        piece, stopped = watcher.add(text[end])
        released += piece
        if stopped:
            return
        held = text[len(released) : end + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_over_three_pieces() -> None:
    """Nothing of it is released."""
    assert run(["one E", "N", "D two"], ["END"]) == ("one ", True)
    assert run(["one E", "N", "E two"], ["END"]) == ("one ENE two", False)
