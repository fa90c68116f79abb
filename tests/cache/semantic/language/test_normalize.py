"""The normal form of a prompt."""

import pytest

from cache.semantic.language.normalize import normalized


@pytest.mark.parametrize(
    "written",
    [
        "What is the capital of Peru?",
        "what is the capital of peru",
        "  WHAT is  the capital\tof Peru ??",
        "What is the capital of Peru!",
        "what is the capital of Peru…",
    ],
)
def test_case_white_space_and_end_punctuation_do_not_matter(written: str) -> None:
    """Five ways of writing one question have one form."""
    assert normalized(written) == "what is the capital of peru"


@pytest.mark.parametrize("name", ["SOLID", "REST", "BASE", "STEM", "RICE", "IT", "WHO", "US", "PET", "SNAP"])
def test_an_acronym_is_not_the_word_that_it_spells(name: str) -> None:
    """So the one is never answered with what was said of the other."""
    assert normalized(f"What is {name} about?") != normalized(f"what is {name.lower()} about")


def test_a_text_all_in_capitals_says_nothing_by_them() -> None:
    """It is said loudly, like a word of grammar in capitals."""
    assert normalized("WHERE DO YOU LIVE?") == normalized("WHERE do you live?") == "where do you live"


def test_an_apostrophe_is_one_sign_however_it_is_typed() -> None:
    """Phones write it curly, keyboards straight."""
    assert normalized("What\u2019s new?") == normalized("what's new") == "what's new"


def test_letters_of_european_languages_are_folded() -> None:
    """Accents are letters; composed or not, they are the same."""
    assert normalized("Où est la gare ?") == "où est la gare"
    assert normalized("Cafe\u0301 ouvert") == normalized("café ouvert")


def test_a_capital_inside_a_sentence_may_be_a_name() -> None:
    """Of a person or a company; where it starts a sentence, and in names that are no other word, it says nothing."""
    for name in ("Gates", "Delta", "Zoom", "Gates's"):
        assert normalized(f"What did {name} say?") != normalized(f"what did {name.lower()} say?")
    assert normalized("Please wait. Doors are closed.") == normalized("please wait. doors are closed")
    assert normalized("Can I fly to Peru?") == normalized("can i fly to peru")
    assert normalized("What I've got Is mine") == normalized("what i've got is mine")
    assert normalized("WHERE IS MY CARD") == normalized("Where is my card?")


@pytest.mark.parametrize(
    "written",
    [
        "",
        "   ",
        "?!",
        "What is 2 plus 2",
        "Was it in 1917?",
        "print(x)",
        "a = b",
        "Say 'hello'",
        'Say "hello"',
        "Use `map`",
        "See example.com",
        "Mail bob@example.com",
        "Open /etc/hosts",
        "first line\nsecond line",
        "- milk\n- bread",
        "Translate: good night",
        "Is node.js fast?",
        "İstanbul nerede",
        "\u0131\u015f\u0131k nedir",
        "Wie heißt die Straße?",
        "東京の天気は?",
        "Как дела?",
        "\u03a4\u03b9 κάνεις;",
        "Is it 😀?",
        "x² is what",
        "C++ or C#",
        "Does the US export oil?",
        "word " * 41,
        "a" * 241,
    ],
    ids=ascii,
)
def test_what_is_no_short_sentence_of_plain_words_has_no_form(written: str) -> None:
    """Where a letter's case, a space or a sign may matter, only the exact prompt is the same."""
    assert normalized(written) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I polish shoes?", "How do I Polish shoes?"),
        ("Where is Turkey cheap?", "Where is turkey cheap?"),
        ("Does apple sell well?", "Does Apple sell well?"),
        ("What is rest good for?", "What is REST good for?"),
        ("How do hearing aids work?", "How does AIDS work?"),
        ("Where is the bath?", "Where is the Bath?"),
        ("Who has a target?", "Who has a Target?"),
    ],
)
def test_a_capital_that_makes_another_word_is_kept(one: str, other: str) -> None:
    """A polish is not Polish."""
    assert normalized(one) != normalized(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("its new", "it's new"),
        ("recover the file", "re-cover the file"),
        ("who is there", "who, is there"),
        ("resume the job", "résumé the job"),
        ("everyday life", "every day life"),
    ],
)
def test_what_changes_words_changes_the_form(one: str, other: str) -> None:
    """Apostrophes, hyphens, commas, accents and spaces inside a sentence stay."""
    assert normalized(one) != normalized(other)
