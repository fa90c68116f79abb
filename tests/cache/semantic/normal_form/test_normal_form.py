"""The normal form of a prompt."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.normal_form.normal_form import MAX_CHARACTERS, MAX_WORDS, normal_form
from tests.cache.semantic.trap_pairs import trap_pairs

TRAPS = trap_pairs()
WORDS = sorted({word for pair in TRAPS for text in (pair.asked, pair.cached) for word in text.split()})
# What the rules look at.
SIGNS = [
    *("I", "i", "I'm", "A", "Can", "may", "May", "Turkey", "france", "France", "US", "us", "don't", "Isn't", "Mr."),
    *("5", "5!", "1.5", "MB", "Mb", "mM", "x", '"', '"To Be"', "«", "`a  b`", "'", "(What", "is)", "to:", "a:b"),
    *("?", "!", "…", "...", ",", ".", "bob@Example.com", "/Etc/", "étage", "Était", "İ", "ß", "Что", "東京の"),
    *("e\u0301", "\u0131", "\u00a0"),
]
texts = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from([*WORDS, *SIGNS]), max_size=12).map(" ".join),
    st.sampled_from(sorted({text for pair in TRAPS for text in (pair.asked, pair.cached)})),
)


def alike(*written: str) -> bool:
    """Whether all have a form, and one."""
    forms = {normal_form(text) for text in written}
    return None not in forms and len(forms) == 1


@pytest.mark.parametrize(
    "written",
    [
        ("What is the capital of France?", "what is the capital of france", "  What is  the capital\tof France ??"),
        ("what is 2+2", "What is 2+2?", "What is 2+2 ?"),
        ("Can I fly to Peru?", "can i fly to peru", "can I fly to Peru"),
        ("I want to know what I can do.", "i want to know what i can do"),
        ("When I ordered it, I paid", "when i ordered it, i paid"),
        ("Will it rain on Monday?", "will it rain on monday"),
        ("What's new?", "what\u2019s new"),
        ("Tell me a joke!", "tell me a joke"),
        ("Please wait. Doors are closed.", "please wait. doors are closed"),
        ('What does "Hello  World" print?', "what does \u201cHello  World\u201d print"),
        ("How many MB are 1.5 GB?", "how many MB are 1.5 GB"),
        ("Is it in US law?", "is it in US law"),
        ("Mail bob@Example.com please", "mail bob@Example.com please."),
        ("I lost my card, what can I do?", "i lost my card, what can i do"),
        ("Cafe\u0301 ouvert", "Café  ouvert."),
        ("Où est la gare ?", "Où est la gare?"),
        ("東京の天気は", "  東京の天気は "),
        ("Translate to Spanish: Good night", "translate to spanish:  Good night"),
    ],
    ids=lambda written: ascii(written[0]),
)
def test_case_white_space_and_end_punctuation_do_not_matter(written: tuple[str, ...]) -> None:
    """Ways of writing one question have one form."""
    assert alike(*written)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I polish shoes?", "How do I Polish shoes?"),
        ("Polish jokes", "polish jokes"),
        ("Turkey prices", "turkey prices"),
        ("Does it rain in march?", "Does it rain in March?"),
        ("How hot is chile?", "How hot is Chile?"),
        ("What is spam?", "What is Spam?"),
        ("What did gates say?", "What did Gates say?"),
        ("How do I use excel?", "How do I use Excel?"),
        ("Who has a target?", "Who has a Target?"),
        ("What does us mean?", "What does US mean?"),
        ("What is it?", "What is IT?"),
        ("Who is it?", "WHO is it?"),
        ("How do hearing aids work?", "How do hearing AIDS work?"),
        ("Aids treatment", "aids treatment"),
        ("What is rest good for?", "What is REST good for?"),
        ("What does i mean?", "What does I mean?"),
        ("What is the value of i in the loop?", "What is the value of I in the loop?"),
        ("Is france right, or France?", "Is France right, or france?"),
    ],
)
def test_a_capital_that_may_make_another_word_is_kept(one: str, other: str) -> None:
    """A polish is not Polish; where a name is a common word too, its capital counts wherever it may be a name."""
    assert normal_form(one) != normal_form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 1.5 times 2", "What is 15 times 2"),
        ("What is 5!", "What is 5?"),
        ("What is n!", "What is n?"),
        ("How long does 5 MB take?", "How long does 5 mb take?"),
        ("How long does 5 MB take?", "How long does 5 Mb take?"),
        ("Is it in mM?", "Is it in MM?"),
        ("Did it happen in 5 May?", "Did it happen in 5 may?"),
        ("Open http://a.example/b?", "Open http://a.example/b"),
        ("Open /etc/Hosts", "Open /etc/hosts"),
        ("What does parseURL do?", "What does parseUrl do?"),
        ("What does max_Size do?", "What does max_size do?"),
        ("What is in aGVsbG8?", "What is in agvsbg8?"),
        ('Say "Hello"', 'Say "hello"'),
        ('Say "a  b"', 'Say "a b"'),
        ("What does `Map` do?", "What does `map` do?"),
        ("Translate to Spanish: Good night!", "Translate to Spanish: Good night"),
        ("Translate to Spanish: Polish", "Translate to Spanish: polish"),
    ],
)
def test_numbers_units_code_and_quotations_are_kept(one: str, other: str) -> None:
    """Letters, signs and spaces of what is no sentence stay as they are written."""
    assert normal_form(one) != normal_form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("its new", "it's new"),
        ("recover the file", "re-cover the file"),
        ("who is there", "who, is there"),
        ("resume the job", "résumé the job"),
        ("everyday life", "every day life"),
        ("It works", "It works?"),
        ("You were there.", "You were there?"),
    ],
)
def test_what_changes_words_or_a_statement_changes_the_form(one: str, other: str) -> None:
    """Signs inside a sentence stay, and a question mark where without it there is no question."""
    assert normal_form(one) != normal_form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Wo ist mein Arm?", "wo ist mein arm"),
        ("Wie gefällt es Ihnen?", "Wie gefällt es ihnen?"),
        ("Was möchten Sie?", "Was möchten sie?"),
        ("İstanbul nerede", "istanbul nerede"),
        ("Isparta nerede", "\u0131sparta nerede"),
        ("Où est Pierre", "Où est pierre"),
        ("Как дела", "как дела"),
    ],
)
def test_capitals_of_other_languages_are_kept(one: str, other: str) -> None:
    """The dictionary is of English: what it cannot tell of a capital is taken for a difference."""
    assert normal_form(one) != normal_form(other)


@pytest.mark.parametrize(
    "written",
    [
        "",
        "   ",
        "?!",
        "print(x) if x == 1 else {}",
        "a[0]",
        "SELECT * FROM t WHERE a <> b",
        'Say "hello',
        "Use `map",
        "Say 'hello'",
        "first line\nsecond line",
        "a\u2028b",
        "zero\u200bwidth",
        "\ud800",
        "word " * (MAX_WORDS + 1),
        "a" * (MAX_CHARACTERS + 1),
    ],
    ids=ascii,
)
def test_what_is_no_short_line_of_text_has_no_form(written: str) -> None:
    """Where any sign may matter, only the exact prompt is the same."""
    assert normal_form(written) is None


def test_no_trap_is_folded() -> None:
    """No two prompts that need different answers have one form."""
    traps = [pair for pair in TRAPS if pair.is_trap]
    assert len(traps) > 300
    assert not [pair for pair in traps if alike(pair.asked, pair.cached)]


@given(texts)
def test_a_normal_form_is_its_own(text: str) -> None:
    """Normalising twice changes nothing."""
    form = normal_form(text)
    if form is not None:
        assert normal_form(form) == form


def _letters(text: str) -> str:
    """Letters and digits without case; composed, as Unicode has several ways to write an accent."""
    return "".join(re.findall(r"\w", unicodedata.normalize("NFC", text).replace("\u02bc", ""))).casefold()


@given(texts)
def test_no_letter_and_no_digit_is_lost(text: str) -> None:
    """Texts of one form have the same letters, but for their case, and the same digits, in the same order."""
    form = normal_form(text)
    if form is not None:
        assert _letters(form) == _letters(text)


@given(texts, texts)
def test_texts_with_other_numbers_are_never_one(one: str, other: str) -> None:
    """Not even if all else is the same."""
    if alike(one, other):
        assert re.findall(r"\d+(?:[.,]\d+)*", one) == re.findall(r"\d+(?:[.,]\d+)*", other)


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=12), st.integers(1, 3), st.sampled_from(["", " ", "\t"]))
def test_white_space_between_words_never_matters(words: list[str], spaces: int, end: str) -> None:
    """However many spaces are typed, the form is that of one."""
    text = " ".join(words)
    if not any(sign in text for sign in '"`«»:'):
        assert normal_form((" " * spaces).join(words) + end) == normal_form(text)
