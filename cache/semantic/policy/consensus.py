"""The guards over several questions with one answer, which show what is wording and what is meaning."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cache.semantic.guards import GUARDS
from cache.semantic.language.text import Text

MIN_QUESTIONS = 3
"""The number of questions from which on they are taken together."""
CORE_SHARE = 2 / 3
"""A word that at least this share of the questions has is part of what they ask for."""

_TYPE, _WORDS = "question", "subject"
_STRICT = tuple((name, refuses) for name, refuses in GUARDS if name not in (_TYPE, _WORDS))
_REFUSES = dict(GUARDS)


class GuardResult(NamedTuple):
    """The result of all guards on two questions.

    `refused_by` is the first guard that refuses, apart from the two guards of wording; `type_agrees` and `words_agree`
    are the results of these two, on the type of question and on its content words.
    """

    refused_by: str | None
    type_agrees: bool
    words_agree: bool

    @property
    def refusal(self) -> str | None:
        """The name of a guard that refuses; None if all agree."""
        return self.refused_by or (None if self.type_agrees else _TYPE) or (None if self.words_agree else _WORDS)


def guard_result(asked: Text, cached: Text) -> GuardResult:
    refused_by = next((name for name, refuses in _STRICT if refuses(asked, cached)), None)
    return GuardResult(refused_by, not _REFUSES[_TYPE](asked, cached), not _REFUSES[_WORDS](asked, cached))


def matching_question(
    asked: Text, questions: Sequence[Text], check: Callable[[Text, Text], GuardResult] = guard_result
) -> tuple[int | None, str]:
    """The question, of several with one and the same answer, that shows this answer to answer `asked`.

    It is the first that no guard refuses. Failing that, MIN_QUESTIONS or more questions show it together, through the
    first that only guards of wording refuse, if

    - some question is of the same type (where a PIN is found and how it is found may be one question),
    - each content word of `asked` occurs in the questions, and none is missing that two thirds have (CORE_SHARE):

          questions  reset my PIN · change the PIN · I forgot my PIN     words: reset change forget PIN   core: PIN
          asked      how do I change a forgotten PIN ✓       forgot my password ✗ (new word)     I forget ✗ (no core)

    So a word that makes the difference is never accepted, because no question with this answer contains it. Numbers,
    dates, names, negation, polarity and order are never a matter of wording.

    Returns:
        The place in `questions` and "", or None and the name of the guard that refuses the first question.
    """
    representative: int | None = None
    type_agrees = words_agree = False
    first_refusal = ""
    for place, cached in enumerate(questions):
        result = check(asked, cached)
        refusal = result.refusal
        if refusal is None:
            return place, ""
        first_refusal = first_refusal or refusal
        if representative is None and result.refused_by is None:
            representative = place
        type_agrees |= result.type_agrees
        words_agree |= result.words_agree
    if (
        representative is None
        or len(questions) < MIN_QUESTIONS
        or not type_agrees
        or not (words_agree or _is_known(asked, questions))
    ):
        return None, first_refusal
    return representative, ""


def _is_known(asked: Text, questions: Sequence[Text]) -> bool:
    """Whether `asked` has the core words of the questions, and no word that none of them has."""
    uses = Counter(stem for cached in questions for stem in cached.stems)
    core = {stem for stem, times in uses.items() if times >= CORE_SHARE * len(questions)}
    # Without a core they are several questions, whose words may mean something else together: that a whale and a cat
    # are mammals, and a dog and a hamster pets, does not make a whale a pet.
    return bool(core) and asked.stems <= uses.keys() and core <= asked.stems
