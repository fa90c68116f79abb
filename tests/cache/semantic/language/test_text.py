"""What holds for every prompt."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.semantic.guards import GUARDS, refusal
from cache.semantic.language.text import Text
from cache.semantic.normal_form.normal_form import normal_form
from tests.cache.semantic.trap_pairs import trap_pairs

SENTENCES = sorted({text for pair in trap_pairs() for text in (pair.asked, pair.cached)})
# Words that the guards react to, so that random texts reach their rules.
WORDS = sorted({word for sentence in SENTENCES for word in sentence.split()})
word_salads = st.lists(st.sampled_from(WORDS), max_size=25).map(" ".join)
prompts = st.one_of(st.text(max_size=200), word_salads, st.sampled_from(SENTENCES))


@given(prompts)
@settings(deadline=None)
def test_no_prompt_is_refused_against_itself(prompt: str) -> None:
    """A prompt may always be answered by its own answer."""
    assert refusal(Text.of(prompt), Text.of(prompt)) is None


@given(prompts, prompts)
@settings(deadline=None)
def test_every_guard_is_symmetric(one: str, other: str) -> None:
    """A guard's verdict does not depend on which of the two was asked first."""
    first, second = Text.of(one), Text.of(other)
    for name, refuses in GUARDS:
        assert refuses(first, second) == refuses(second, first), name


def _dressed(sentence: str, upper: bool, spaces: int, ending: str) -> str:
    return (sentence.upper() if upper else sentence).replace(" ", " " * spaces) + ending


@given(
    st.one_of(word_salads, st.sampled_from(SENTENCES)),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from(["", "?", "!", ".", " ?", "...", "  "]),
)
@settings(deadline=None)
def test_two_prompts_of_one_normal_form_are_never_refused(sentence: str, upper: bool, spaces: int, ending: str) -> None:
    """The guards and the normal form agree on what cannot matter."""
    other = _dressed(sentence, upper, spaces, ending)
    form = normal_form(sentence)
    if form is not None and form == normal_form(other):
        assert refusal(Text.of(sentence), Text.of(other)) is None


@given(prompts)
def test_a_normal_form_is_its_own(prompt: str) -> None:
    """Normalising twice changes nothing, and the guards cannot tell a prompt from its form."""
    form = normal_form(prompt)
    if form is not None:
        assert normal_form(form) == form
        assert refusal(Text.of(prompt), Text.of(form)) is None


@given(st.text(min_size=500, max_size=10_000))
@settings(max_examples=25, deadline=None)
def test_any_unicode_of_any_length_is_read(prompt: str) -> None:
    """No prompt makes a guard raise."""
    text = Text.of(prompt)
    assert refusal(text, Text.of(prompt[::-1])) is None or refusal(text, text) is None


ADVERSARIAL = [
    "a",
    "'",
    '"',
    "“",
    "`",
    "(",
    "1,",
    "1.",
    "-1",
    "a'",
    "a-",
    "a@",
    "a.",
    "/a",
    "{ ",
    ";\t",
    "not ",
    "one ",
    "hundred and ",
    "how ",
    "what is the ",
    "from a to b ",
    "a of b ",
    "a and b ",
    "may 1 ",
    "SELECT ",
    "un",
    "\u0301",
    "\U0001f600",
    "是",
    "\n",
    "$1m ",
]


@pytest.mark.parametrize("piece", ADVERSARIAL, ids=ascii)
def test_reading_a_prompt_takes_time_linear_in_its_length(piece: str) -> None:
    """Eight times the length costs at most some twenty times the time, whatever is repeated."""

    def seconds(length: int) -> float:
        prompt = (piece * length)[:length] + "x"
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            text = Text.of(prompt)
            refusal(text, Text.of(prompt + "y"))
            best = min(best, time.perf_counter() - started)
        return best

    # The constant is for a machine that is busy elsewhere: quadratic time would be seconds.
    assert seconds(16_000) <= 20 * seconds(2_000) + 0.05
