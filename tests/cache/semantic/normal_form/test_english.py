"""How English words are written."""

import time

import pytest

from cache.semantic.normal_form import english
from cache.semantic.normal_form.english import load, spelling
from cache.semantic.normal_form.normal_form import normal_form


@pytest.mark.parametrize("word", ["remove", "excel", "what's", "can't", "delivery"])
def test_common_words(word: str) -> None:
    """A word that is no name is plain only."""
    found = spelling(word)
    assert found.plain
    assert not found.name
    assert not found.acronym


@pytest.mark.parametrize("word", ["france", "france's", "monday", "spanish", "i'm", "london", "january", "azerbaijan"])
def test_names(word: str) -> None:
    """A word that only exists with a capital is a name."""
    found = spelling(word)
    assert found.name
    assert not found.plain


@pytest.mark.parametrize("word", ["polish", "turkey", "china", "march", "java", "spam", "chile", "apple", "amazon"])
def test_words_that_are_names_too(word: str) -> None:
    """What exists in both spellings is both, and not among the most frequent words."""
    found = spelling(word)
    assert found.plain
    assert found.name
    assert not found.frequent


@pytest.mark.parametrize("word", ["us", "it", "who", "may", "will", "can"])
def test_frequent_words_that_are_acronyms_or_names_too(word: str) -> None:
    """At the start of a sentence they are the word."""
    found = spelling(word)
    assert found.frequent
    assert found.plain
    assert found.name or found.acronym


def test_an_unknown_word_is_nothing() -> None:
    """No spelling of it is known."""
    assert not any(spelling("kubernetes"))


def test_the_words_are_read_once() -> None:
    """Not on the path of a request: a form takes a hundredth of the time that reading them takes."""
    english.load.cache_clear()
    began = time.process_time()
    load()
    reading = time.process_time() - began
    text = "How can I change the delivery address of the card that I ordered on Monday?"
    took = []
    for _ in range(20):
        began = time.process_time()
        normal_form(text)
        took.append(time.process_time() - began)
    assert min(took) < reading / 100
