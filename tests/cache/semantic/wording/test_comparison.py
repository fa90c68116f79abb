"""What forbids that questions share an answer, and what several questions with one answer show."""

import csv
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.semantic.wording.comparison import FEATURE_NAMES, VETOES, compare
from cache.semantic.wording.text import Text
from tests.cache.semantic.trap_pairs import DATA, Pair, trap_pairs

PAIRS = trap_pairs()
# Too little is common to be a near-copy; what the embedding and the traffic say of them has to do.
PASSING_TRAPS = {
    ("What does こんにちは mean?", "What does さようなら mean?"),
    ("Who are you?", "Who am I?"),
    ("Who sold you the car?", "Who did you sell the car to?"),
}
WRAPPERS = ("{}", "Hi, {}", "{} Thanks!", "Please tell me: {}", "I have a question. {}", "Quick question: {}", "So, {}")


def finance_traps() -> list[tuple[str, str]]:
    with (DATA / "finance_adversarial_pairs.csv").open(encoding="utf-8", newline="") as file:
        return [(row["seed"], row["probe"]) for row in csv.DictReader(file) if row["should_hit"] == "0"]


def wording(asked: str, *questions: str) -> tuple[int | None, str]:
    found = compare(Text.of(asked), [Text.of(question) for question in questions])
    assert len(found.features) == (0 if found.veto else len(FEATURE_NAMES))
    return found.place, found.veto


def features(asked: str, *questions: str) -> Sequence[float]:
    return compare(Text.of(asked), [Text.of(question) for question in questions]).features


@pytest.mark.parametrize(
    "pair", [pair for pair in PAIRS if pair.is_trap], ids=lambda pair: f"{pair.asked}|{pair.cached}"
)
def test_a_trap_is_vetoed(pair: Pair) -> None:
    """One question alone never vouches for a near-copy of another meaning."""
    place, veto = wording(pair.asked, pair.cached)
    if (pair.asked, pair.cached) not in PASSING_TRAPS:
        assert place is None
        assert veto in VETOES


def test_no_finance_trap_passes() -> None:
    """Of the published pairs that differ in polarity, number, entity or time, each is refused."""
    traps = finance_traps()
    assert len(traps) >= 30
    assert [trap for trap in traps if wording(*trap)[0] is not None] == []


def test_no_finance_trap_passes_in_a_dense_neighbourhood() -> None:
    """Many wordings of one question do not vouch for another that only looks like it."""
    passed = [
        (seed, probe) for seed, probe in finance_traps() if wording(probe, *(w.format(seed) for w in WRAPPERS))[1] == ""
    ]
    assert passed == []
    assert all(wording(seed, *(w.format(seed) for w in WRAPPERS))[0] == 0 for seed, _ in finance_traps())


@pytest.mark.parametrize(
    ("asked", "cached", "veto"),
    [
        ("Is 5 mg safe?", "Is 10 mg safe?", "numbers"),
        ("Is 5 mg safe?", "Is 5 ml safe?", "numbers"),
        ("foods that do not contain gluten", "foods that contain gluten", "negation"),
        ("pasta ohne Käse", "pasta mit Käse", "negation"),
        ("flights from Boston to Denver", "flights from Denver to Boston", "order"),
        ("Should I sell gold now?", "Should I buy gold now?", "words"),
        ("Wie aktiviere ich meine Karte?", "Wie sperre ich meine Karte?", "words"),
        ("東京の天気は?", "大阪の天気は?", "words"),
        ("Wie wird das Wetter heute in Berlin?", "What will the weather be like in Berlin today?", "language"),
        ('What does "break a leg" mean?', "Explain the idiom: break an arm", "verbatim"),
        ("what is max_tokens", "explain what the option min_tokens is for", "verbatim"),
        ("tell me of " + "the long road " * 40 + "slowly", "tell me of " + "the long road " * 40 + "gently", "length"),
    ],
)
def test_a_veto_has_a_name(asked: str, cached: str, veto: str) -> None:
    assert wording(asked, cached) == (None, veto)


def test_no_word_is_a_veto_between_questions_of_other_words() -> None:
    """Not even a negation: a paraphrase differs in most of its words."""
    assert wording("Why can't I pay with my card?", "My payment was declined, what is wrong?") == (0, "")


def test_questions_with_one_answer_show_what_is_wording() -> None:
    """A word that another of them has, or lacks, makes no difference."""
    asked = "How do I top up my account?"
    assert wording(asked, "How do I load my account?") == (None, "words")
    assert wording(asked, "How do I load my account?", "Can I top up?") == (0, "")


def test_what_all_of_them_ask_about_may_not_be_missing() -> None:
    """However many they are."""
    questions = ["How do I cancel my order?", "Can I cancel an order that I placed?", "cancel my order please"]
    assert wording("How do I place my order?", *questions) == (None, "words")


def test_a_number_that_none_of_them_has_stays_a_veto() -> None:
    """Also among many, and where they have numbers of their own."""
    questions = ["set a 5 minute timer", "set a 10 minute timer", "a timer for 20 minutes", "start the timer"]
    assert wording("set a 7 minute timer", *questions) == (None, "numbers")
    assert wording("set a 10 minute timer", *questions)[0] == 1


def test_a_word_that_none_of_many_has_is_left_to_the_policy() -> None:
    """As a feature, which says whether a single word was replaced or others inserted."""
    questions = ["tell me a blonde joke", "tell me a dog joke", "do you know a joke"]
    assert wording("tell me a lawyer joke", *questions) == (0, "")
    assert list(features("tell me a lawyer joke", *questions)[:2]) == [1.0, 0.0]
    assert list(features("please tell me a dog joke", *questions)[:2]) == [0.0, 1.0]
    assert list(features("tell me a dog joke", *questions)[:2]) == [0.0, 0.0]


def test_a_word_in_the_place_of_another_is_seen_though_both_stand_elsewhere_too() -> None:
    """As the signs of "I" and "you" do in many Chinese requests."""
    mine, yours = "你能告诉我我的名字吗", "你能告诉我你的名字吗"
    assert wording(mine, yours) == wording(yours, mine) == (None, "order")
    assert wording("i really really need a new card", "i really need a new card") == (0, "")


def test_words_may_be_quoted_in_one_question_only_in_any_script() -> None:
    """Chinese has no spaces around them."""
    cached = "我的付款一直是待处理状态、到底要等几天"
    assert wording("“待处理”的付款要等多久才能完成", cached) == (0, "")
    assert wording("“已完成”的付款是什么意思", cached) == (None, "verbatim")


def test_a_question_of_another_language_does_not_hide_the_others() -> None:
    """The next of them vouches."""
    asked = "How will the weather be in Berlin today?"
    assert wording(asked, "Wie wird das Wetter heute in Berlin?", "Berlin weather today, please tell me how it is") == (
        1,
        "",
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from([text for pair in PAIRS[::6] for text in (pair.asked, pair.cached)]), min_size=1, max_size=6
    )
)
def test_a_question_is_served_for_itself(questions: list[str]) -> None:
    """Whatever else has its answer, and wherever it stands among them."""
    for question in questions:
        place, veto = wording(question, *questions)
        assert veto == ""
        assert place is not None
        assert Text.of(questions[place]).words == Text.of(question).words


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.asked}|{pair.cached}")
def test_which_of_two_questions_came_first_makes_no_difference(pair: Pair) -> None:
    assert (wording(pair.asked, pair.cached)[0] is None) == (wording(pair.cached, pair.asked)[0] is None)


@pytest.mark.parametrize(("dataset", "passing", "stopped"), [("banking77", 0.5, 0.2), ("clinc150", 0.4, 0.4)])
def test_real_neighbours_mostly_pass(dataset: str, passing: float, stopped: float) -> None:
    """Of the nearest questions by embedding, at least `passing` of those with one intent pass alone.

    What is vetoed of the others is at least `stopped`; the rest is for the policy to tell.
    """
    counts: Counter[tuple[bool, bool]] = Counter()
    with (DATA / "intent_neighbors.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["dataset"] == dataset:
                counts[row["same_intent"] == "1", wording(row["asked"], row["cached"])[0] is not None] += 1
    assert counts[True, True] / (counts[True, True] + counts[True, False]) >= passing
    assert counts[False, False] / (counts[False, True] + counts[False, False]) >= stopped


@pytest.mark.parametrize(
    ("asked", "cached"),
    [("\N{THUMBS UP SIGN}", "\N{THUMBS DOWN SIGN}"), ("שלום", "לא"), ("-", "\u2028"), ("yes", "no thanks")],
)
def test_a_word_or_two_are_answered_for_themselves_only(asked: str, cached: str) -> None:
    """Vectors of characters that a model does not know are equal."""
    assert wording(asked, cached)[0] is None
    assert wording(asked, asked)[0] == 0


@pytest.mark.parametrize(
    ("asked", "cached", "veto"),
    [
        ("is it -20 degrees cold?", "is it 20 degrees cold?", "numbers"),
        ("What is (1 + 2) * 3?", "What is 1 + (2 * 3)?", "order"),
        ("What is 2*10?", "What is 2 10?", "numbers"),
        ("What is 10 - 2?", "What is 10 2?", "numbers"),
        ("what is 5!", "what is 5", "numbers"),
        ("what does rm -f do", "what does rm f do", "numbers"),
        ("What is 2\u00b3?", "What is 23?", "numbers"),
        ("book a flight from London to Paris tomorrow", "book a flight from Paris to London tomorrow please", "order"),
        ("Please convert 100 USD to EUR", "convert 100 EUR to USD", "order"),
        ("cheap flights from New York to Los Angeles", "flights from Los Angeles to New York please", "order"),
        ("what does 'polish' mean?", "what does 'Polish' mean?", "verbatim"),
        ("Translate to German: May", "Translate to German: may", "verbatim"),
    ],
)
def test_what_looks_equal_and_is_not_is_vetoed(asked: str, cached: str, veto: str) -> None:
    """Signs of arithmetic, raised digits, two words that change places beside a filler, capitals in quotations."""
    assert wording(asked, cached) == wording(cached, asked) == (None, veto)


def test_only_a_near_copy_shows_that_a_number_or_a_negation_makes_no_difference() -> None:
    """Another question with the same answer may say it of something else."""
    other = "I can not use my new card, how do I get it working?"
    assert wording("How do I not activate my card?", "How do I activate my card?", other) == (None, "negation")
    other = "Can I return it after 60 days if I paid in 14 instalments?"
    assert wording("Can I get a refund after 14 days?", "Can I get a refund after 30 days?", other) == (None, "numbers")


@pytest.mark.parametrize("cached", ["I am 18 (eighteen)", "Hello - how are you?", "**How** do I (really) pay?"])
def test_signs_away_from_numbers_say_nothing(cached: str) -> None:
    """Dashes, brackets and emphasis of prose."""
    assert "-" not in Text.of(cached).words
    assert "*" not in Text.of(cached).words
