"""The guards over a crowd: what several questions with one answer show to be wording, not meaning."""

from collections import Counter
from collections.abc import Sequence

from cache.semantic.guards import GUARDS
from cache.semantic.text import Text

FEWEST = 3
"""Questions with one answer that are a crowd."""
CORE = 0.5
"""A word that at least this share of the crowd has belongs to what it asks for."""

# Guards that ask how something is worded. What one question of the crowd does not say as the asked one does, another
# may. All other guards (numbers, negation, order, ...) must agree on one and the same question.
_OF_WORDING = frozenset({"question", "subject"})
_STRICT = tuple((name, refuses) for name, refuses in GUARDS if name not in _OF_WORDING)
_WORDING = tuple((name, refuses) for name, refuses in GUARDS if name in _OF_WORDING)


def consented(asked: Text, crowd: Sequence[Text]) -> int | None:
    """Which of the `crowd`, questions with one and the same answer, vouches that it answers `asked`; None if none does.

    It is the first that no guard refuses. Failing that, a crowd of FEWEST or more vouches together: the first whom no
    guard but those of wording refuses, if

    - some question of the crowd is of the same type ("how long" is none of "where", but both are asked for a PIN), and
    - each content word of `asked` was used in the crowd, and none is missing that belongs to all of it (CORE):

          crowd   reset PIN · change PIN · forgot PIN, reset        core: PIN      words: reset change forgot PIN
          asked   forgot PIN ✓    reset password ✗ (new word)       forgot ✗ (lacks the core)

    So a word that makes the difference, because no question with this answer ever had it, is never waved through.
    """
    vouching: int | None = None
    wordings = dict.fromkeys(_OF_WORDING, False)
    for place, cached in enumerate(crowd):
        agrees = not any(refuses(asked, cached) for _, refuses in _STRICT)
        worded = [not refuses(asked, cached) for _, refuses in _WORDING]
        if agrees and all(worded):
            return place
        if agrees and vouching is None:
            vouching = place
        for (name, _), agreed in zip(_WORDING, worded, strict=True):
            wordings[name] |= agreed
    if vouching is None or len(crowd) < FEWEST or not wordings["question"]:
        return None
    return vouching if wordings["subject"] or _known(asked, crowd) else None


def _known(asked: Text, crowd: Sequence[Text]) -> bool:
    """Whether `asked` has the core of what the crowd says, and no word that it never says."""
    uses = Counter(stem for cached in crowd for stem in cached.stems)
    core = {stem for stem, times in uses.items() if times >= CORE * len(crowd)}
    return bool(asked.stems) and asked.stems <= uses.keys() and core <= asked.stems
