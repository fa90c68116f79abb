"""Which questions are near-copies, and what they differ in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.wording.comparison import MAX_WORDS, difference, is_number

WORDS = ("how", "do", "i", "buy", "sell", "gold", "now", "5", "10", "kg", "to", "from")
QUESTIONS = st.lists(st.sampled_from(WORDS), max_size=9).map(tuple)


def test_one_word_in_place_of_another_is_a_substitution() -> None:
    """The two stand for each other; what is added or removed alone does not."""
    found = difference(("should", "i", "buy", "gold", "now"), ("should", "i", "sell", "gold"))
    assert found is not None
    assert found.added == {"buy", "now"}
    assert found.removed == {"sell"}
    assert found.substituted == {"buy", "sell"}
    assert not found.moved


def test_words_that_change_places_have_moved() -> None:
    found = difference(("boston", "to", "denver"), ("denver", "to", "boston"))
    assert found is not None
    assert found.moved
    assert not found.added | found.removed


def test_what_stands_after_a_number_is_counted() -> None:
    found = difference(("take", "5", "mg", "daily"), ("take", "5", "ml", "daily"))
    assert found is not None
    assert found.substituted == {"mg", "ml"} == found.counted & found.substituted


@pytest.mark.parametrize(
    ("word", "expected"),
    [("5", True), ("½", True), ("٣", True), ("三", True), ("两", True), ("什", False), ("five", False)],
)
def test_a_sign_of_another_word_is_no_number(word: str, expected: bool) -> None:
    """Unicode counts the first sign of 什么, "what", among the numbers, and that of 两, "two", not."""
    assert is_number(word) is expected


def test_questions_in_other_words_are_no_near_copies() -> None:
    assert difference(("why", "was", "my", "card", "declined"), ("payment", "did", "not", "go", "through")) is None


def test_differences_in_many_places_are_no_near_copy() -> None:
    """Three changed spans make another question of the same frame, not a copy."""
    assert difference(tuple("abcdefg"), tuple("axcyezg")) is None


@given(QUESTIONS, QUESTIONS)
def test_a_difference_is_the_same_from_both_sides(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    """What one adds, the other removes; equal words differ in nothing, and no more than MAX_WORDS differ."""
    here, there = difference(one, other), difference(other, one)
    assert (here is None) == (there is None) or one != other
    if here is not None and there is not None:
        assert (here.added, here.removed, here.moved) == (there.removed, there.added, there.moved)
        assert here.substituted <= here.added | here.removed
        assert len(here.added) <= MAX_WORDS[1]
    same = difference(one, one)
    assert same is not None
    assert not same.added | same.removed
    assert not same.moved
