"""The guards over a crowd: what several questions with one answer show to be wording, not meaning."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cache.semantic.guards import GUARDS
from cache.semantic.language.text import Text

FEWEST = 3
"""Questions with one answer that are a crowd."""
CORE = 2 / 3
"""A word that at least this share of the crowd has belongs to what it asks for."""

_TYPE, _WORDS = "question", "subject"
_STRICT = tuple((name, refuses) for name, refuses in GUARDS if name not in (_TYPE, _WORDS))
_REFUSES = dict(GUARDS)


class Opinion(NamedTuple):
    """What the guards say of two questions.

    `refused_by` is the first that refuses, of all but those that ask how something is worded; `type_agrees` and
    `words_agree` are what these say, on the type of question and on its content words.
    """

    refused_by: str | None
    type_agrees: bool
    words_agree: bool

    @property
    def refusal(self) -> str | None:
        """The name of a guard that refuses; None if all agree."""
        return self.refused_by or (None if self.type_agrees else _TYPE) or (None if self.words_agree else _WORDS)


def opinion(asked: Text, cached: Text) -> Opinion:
    refused_by = next((name for name, refuses in _STRICT if refuses(asked, cached)), None)
    return Opinion(refused_by, not _REFUSES[_TYPE](asked, cached), not _REFUSES[_WORDS](asked, cached))


def voucher(
    asked: Text, crowd: Sequence[Text], opine: Callable[[Text, Text], Opinion] = opinion
) -> tuple[int | None, str]:
    """Who of the `crowd`, questions with one and the same answer, vouches that it answers `asked`.

    It is the first that no guard refuses. Failing that, a crowd of FEWEST or more vouches together, through the first
    whom no guard refuses but those of wording, if

    - some question of the crowd is of the same type (where a PIN is found and how it is found may be one question),
    - each content word of `asked` was used in the crowd, and none is missing that two thirds of it have (CORE):

          crowd   reset my PIN · change the PIN · I forgot my PIN        words: reset change forget PIN   core: PIN
          asked   how do I change a forgotten PIN ✓        forgot my password ✗ (new word)      I forget ✗ (no core)

    So a word that makes the difference is never waved through, because no question with this answer ever had it; and
    what numbers, dates, names, negation, polarity and order say is never a matter of wording.

    Returns:
        The place in `crowd` and "", or None and the name of the guard that refuses its first question.
    """
    spokesman: int | None = None
    type_agrees = words_agree = False
    first_refusal = ""
    for place, cached in enumerate(crowd):
        said = opine(asked, cached)
        refusal = said.refusal
        if refusal is None:
            return place, ""
        first_refusal = first_refusal or refusal
        if spokesman is None and said.refused_by is None:
            spokesman = place
        type_agrees |= said.type_agrees
        words_agree |= said.words_agree
    if spokesman is None or len(crowd) < FEWEST or not type_agrees or not (words_agree or _is_known(asked, crowd)):
        return None, first_refusal
    return spokesman, ""


def _is_known(asked: Text, crowd: Sequence[Text]) -> bool:
    """Whether `asked` has the core of what the crowd says, and no word that it never says."""
    uses = Counter(stem for cached in crowd for stem in cached.stems)
    core = {stem for stem, times in uses.items() if times >= CORE * len(crowd)}
    # Without a core they are several questions, whose words may mean something else together: that a whale and a cat
    # are mammals, and a dog and a hamster pets, does not make a whale a pet.
    return bool(core) and asked.stems <= uses.keys() and core <= asked.stems
