"""Inflections, spellings, derivations, slips and opposites of words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.language.lemma import lemma
from cache.semantic.language.word_relations import are_opposed, is_derived, is_slip


@pytest.mark.parametrize(
    "forms",
    [
        "colour color colours",
        "organise organize organised organizing organises",
        "realise realize realised",
        "activate activates activated activating activation",
        "cancel cancels cancelled canceled cancelling cancellation",
        "make makes made making",
        "visit visits visited visiting",
        "travel travelling traveled",
        "try tries tried trying",
        "party parties",
        "box boxes",
        "bus buses",
        "pay pays paid paying payment",
        "transfer transfers transferred transferring",
        "centre center centres",
        "licence licensed license",
        "analyse analyze analysing",
        "child children",
        "use used using uses",
    ],
)
def test_the_forms_of_a_word_have_one_lemma(forms: str) -> None:
    """Whether inflected, derived or spelled in British English."""
    assert len({lemma(form) for form in forms.split()}) == 1


@pytest.mark.parametrize(
    "words",
    [
        "car care",
        "plan plane",
        "new news",
        "window windows",
        "rat rate",
        "past paste",
        "king ring",
        "hour our",
        "nation note",
        "station state",
        "word work",
        "bus busy",
        "spring sprint",
        "unite united",
    ],
)
def test_words_that_look_alike_keep_their_own_lemma(words: str) -> None:
    """An ending is only taken off where it is one."""
    one, other = words.split()
    assert lemma(one) != lemma(other)


@given(st.text(max_size=30))
def test_every_string_has_a_lemma(word: str) -> None:
    """Nothing raises, and what is a word stays one."""
    assert bool(lemma(word)) == bool(word)


@pytest.mark.parametrize("pair", ["password passwrod", "library libary", "address adress", "receive recieve"])
def test_a_slip_is_forgiven(pair: str) -> None:
    """Two letters swapped, one doubled or left out."""
    assert is_slip(*map(lemma, pair.split()))


@pytest.mark.parametrize(
    "pair",
    ["sulfate sulfite", "desert dessert", "dairy diary", "iran iraq", "trail trial", "card cards", "adverse averse"],
)
def test_another_word_is_no_slip(pair: str) -> None:
    """However near its letters are."""
    assert not is_slip(*map(lemma, pair.split()))


def test_an_ending_that_keeps_the_subject_is_forgiven() -> None:
    """A noun of the same verb, but not who does it."""
    assert is_derived("invest", "investment")
    assert not is_derived("invest", "investor")
    assert not is_derived("depart", "department")


@pytest.mark.parametrize(
    "pair",
    ["lock unlock", "prepaid postpaid", "careful careless", "connect disconnect", "lender lendee", "valid invalid"],
)
def test_opposites_by_affix_are_seen_either_way_round(pair: str) -> None:
    """A prefix or suffix that turns the meaning round."""
    one, other = (frozenset({word}) for word in pair.split())
    assert are_opposed(one, other)
    assert are_opposed(other, one)


def test_what_only_looks_like_an_opposite_is_none() -> None:
    """Flammable is inflammable."""
    assert not are_opposed(frozenset({lemma("flammable")}), frozenset({lemma("inflammable")}))
    assert not are_opposed(frozenset({"card"}), frozenset({"bank"}))
