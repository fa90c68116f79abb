"""Windows over a text: which tokens each scores, and after how many."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.evaluation.scores import Window, windows


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Tokens of a text, a window and a stride."""
    size = draw(st.integers(2, 40))
    return draw(st.integers(2, 300)), size, draw(st.integers(1, size - 1))


@given(sizes())
def test_every_token_but_the_first_is_scored_once(some: tuple[int, int, int]) -> None:
    """Every token but the first is scored once, in order, and never as the first of its window."""
    tokens, size, stride = some
    each = list(windows(tokens, size, stride))
    assert list(itertools.chain(*(range(w.scored, w.end) for w in each))) == list(range(1, tokens))
    assert all(w.begin < w.scored < w.end <= w.begin + size for w in each)


@given(sizes())
def test_every_token_is_scored_after_size_minus_stride_tokens(some: tuple[int, int, int]) -> None:
    """Every token is scored after at least ``size - stride`` tokens, or after all that precede it."""
    tokens, size, stride = some
    for window in windows(tokens, size, stride):
        assert window.begin == 0 or window.scored - window.begin >= size - stride


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (2, [Window(0, 1, 2)]),
        (8, [Window(0, 1, 8)]),
        (9, [Window(0, 1, 8), Window(6, 8, 9)]),
        (15, [Window(0, 1, 8), Window(6, 8, 14), Window(12, 14, 15)]),
    ],
)
def test_windows_of_eight_with_a_stride_of_six(tokens: int, expected: list[Window]) -> None:
    """Windows of 8 with a stride of 6 end with the text, and no window follows."""
    assert list(windows(tokens, 8, 6)) == expected
