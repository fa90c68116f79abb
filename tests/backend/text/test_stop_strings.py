"""A stop string ends the text before it, however the text is cut into pieces."""

from __future__ import annotations

import itertools
from typing import SupportsIndex

from hypothesis import given
from hypothesis import strategies as st

from backend.text.stop_strings import StopStrings

TEXT = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=7), max_size=3)


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    watcher = StopStrings(tuple(stops))
    released = ""
    for piece in pieces:
        text, stopped = watcher.add(piece)
        released += text
        if stopped:
            assert watcher.finish() == "", "what follows is gone too"
            return released, True
    rest = watcher.finish()
    assert watcher.finish() == "", "it is sent once"
    return released + rest, False


@given(text=TEXT, stops=STOPS, data=st.data())
def test_pieces_do_not_matter_for_whether_it_stops(text: str, stops: list[str], data: st.DataObject) -> None:
    """Text stops at the first complete stop string however it is cut, and is sent up to its start."""
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
    """Only text that may be the start of a stop string is held back."""
    watcher = StopStrings(tuple(stops))
    released = ""
    for end in range(len(text)):
        piece, stopped = watcher.add(text[end])
        released += piece
        if stopped:
            return
        held = text[len(released) : end + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_every_short_stop_string_is_found_in_every_text() -> None:
    """Every stop string of up to five letters is found in every text of eight, self-overlapping ones included."""
    texts = ["".join(letters) for letters in itertools.product("ab", repeat=8)]
    for length in range(1, 6):
        for stop in map("".join, itertools.product("ab", repeat=length)):
            for text in texts:
                assert run(list(text), [stop]) == (text.partition(stop)[0], stop in text)


def test_a_stop_string_over_three_pieces() -> None:
    """A stop string over three pieces is found, and no part of it is released."""
    assert run(["one E", "N", "D two"], ["END"]) == ("one ", True)
    assert run(["one E", "N", "E two"], ["END"]) == ("one ENE two", False)


class Counting(str):
    """A stop string that counts the lookups of its characters."""

    lookups = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        Counting.lookups += 1
        return super().__getitem__(key)


def test_the_work_does_not_grow_with_the_length_of_the_stops() -> None:
    """The lookups per character do not grow with the length of the stop strings, even if matches break late."""

    text = ("a" * 999 + "q") * 3
    counts = []
    for length in (10, 1000):
        stops = tuple(Counting("a" * (length - 1 - i) + "b" * i + "Z") for i in (0, length // 3, length // 2))
        watcher = StopStrings(stops)
        Counting.lookups = 0
        assert "".join(watcher.add(character)[0] for character in text) + watcher.finish() == text
        counts.append(Counting.lookups)
    assert counts[1] <= 1.1 * counts[0]
    assert counts[1] <= 3 * 3 * len(text)


def test_no_single_character_takes_many_lookups() -> None:
    """A character that breaks a match of a thousand characters takes at most two lookups."""

    watcher = StopStrings((Counting("a" * 1000),))
    watcher.add("a" * 999)
    Counting.lookups = 0
    assert watcher.add("b") == ("a" * 999 + "b", False)
    assert Counting.lookups <= 2
