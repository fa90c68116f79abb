"""Relations of two words: a misspelling, a derivation, or an opposite of the other."""

from functools import lru_cache

from cache.semantic.language.lemma import lemma
from cache.semantic.language.lexicon import words
from cache.semantic.language.lexicon.antonyms import (
    OPPOSING_PREFIXES,
    SAME_IN_SPITE_OF_PREFIX,
    SWAPPED_PREFIXES,
    SWAPPED_SUFFIXES,
)

_KEPT = 8192
_NO_OPPOSITES = frozenset((lemma(one), lemma(other)) for one, other in SAME_IN_SPITE_OF_PREFIX)
_MIN_ROOT = 3
# A slip in a shorter word is too often another word.
_MIN_SWAPPED, _MIN_DROPPED = 5, 7
# Endings that make a noun of the same verb, or of the same adjective.
_DERIVING = words("ment ation ion ness ance ence ity ing")
_NOT_DERIVED = frozenset(
    {"depart", "apart", "compart", "ment", "percent", "univers", "commun", "just", "human", "matur"}
)
# One letter doubled, dropped or swapped, and yet two words.
_TWO_WORDS = frozenset(
    frozenset(map(lemma, pair.split("/")))
    for pair in words(
        "trial/trail angel/angle dairy/diary quiet/quite casual/causal martial/marital untied/united "
        "calvary/cavalry sacred/scared exist/exits being/begin bread/beard barley/barely minute/minuet "
        "discrete/discreet silver/sliver tired/tried field/filed reserve/reverse except/expect desert/dessert "
        "later/latter diner/dinner loose/lose super/supper bitter/biter striped/stripped furry/fury comma/coma "
        "canon/cannon carer/career below/bellow planning/planing adverse/averse country/county through/thorough "
        "morning/mourning statue/statute patient/patent insulin/inulin contact/contract friend/fiend "
        "convert/covert conversation/conservation simulate/stimulate genetic/generic location/allocation "
        "reaction/creation reactive/creative breath/breathe prostate/prostrate mediation/medication "
        "mediation/meditation infection/inflection finance/fiance deletion/depletion ingestion/indigestion "
        "corporation/cooperation planet/plane clothes/cloth minister/mister altitude/latitude auction/action "
        "section/secretion dictation/citation irritation/irrigation"
    )
)


@lru_cache(_KEPT)
def is_slip(one: str, other: str) -> bool:
    """Whether two stems differ by one likely slip of the keyboard.

    That is two neighbouring letters swapped, a letter doubled or not, or in a longer word a letter left out; never the
    first letter, and never one letter for another, which makes sulfite of sulfate. (Damerau, 1964, found four fifths of
    all spelling errors to be one such slip.)
    """
    if not (one.isascii() and other.isascii() and one.isalpha() and other.isalpha()) or one[0] != other[0]:
        return False
    if frozenset((one, other)) in _TWO_WORDS:
        return False
    if len(one) == len(other):
        return len(one) >= _MIN_SWAPPED and _is_swap(one, other)
    short, long = sorted((one, other), key=len)
    if len(long) - len(short) != 1 or len(long) < _MIN_SWAPPED:
        return False
    position = next((i for i, letter in enumerate(short) if letter != long[i]), len(short))
    if position == len(short) or short[position:] != long[position + 1 :]:
        # A letter more at the end is an ending, not a slip.
        return False
    return len(long) >= _MIN_DROPPED or long[position] == long[position - 1]


def _is_swap(one: str, other: str) -> bool:
    differing = [i for i in range(len(one)) if one[i] != other[i]]
    if len(differing) != 2 or differing[1] != differing[0] + 1:
        return False
    first, second = differing
    return one[first] == other[second] and one[second] == other[first]


@lru_cache(_KEPT)
def is_derived(one: str, other: str) -> bool:
    """Whether one stem is the other with an ending that keeps its subject: invest and investment."""
    short, long = sorted((one, other), key=len)
    return len(short) >= 4 and short not in _NOT_DERIVED and long.startswith(short) and long[len(short) :] in _DERIVING


@lru_cache(_KEPT)
def roots(stem: str) -> tuple[tuple[str, str], ...]:
    """(root, affix) for each way to take an affix that reverses or replaces the meaning off `stem`.

    An affix is written "un-" or "-less".
    """
    found = [
        (stem[len(prefix) :], f"{prefix}-")
        for prefix in OPPOSING_PREFIXES
        if stem.startswith(prefix) and len(stem) >= len(prefix) + _MIN_ROOT
    ]
    found += [
        (stem[: -len(suffix)], f"-{suffix}")
        for suffix in _SUFFIXES
        if stem.endswith(suffix) and len(stem) >= len(suffix) + _MIN_ROOT
    ]
    return tuple(found)


def are_opposed(some: frozenset[str], others: frozenset[str]) -> bool:
    """Whether a word of `some` and one of `others` are opposites by affix: lock and unlock, pre- and postpaid."""
    by_root: dict[str, list[str]] = {}
    for stem in some:
        for root, affix in roots(stem):
            if root in others and affix not in _ONLY_SWAPPED and (root, stem) not in _NO_OPPOSITES:
                return True
            by_root.setdefault(root, []).append(affix)
    for stem in others:
        for root, affix in roots(stem):
            if root in some and affix not in _ONLY_SWAPPED and (root, stem) not in _NO_OPPOSITES:
                return True
            if any((affix, other) in _SWAPS for other in by_root.get(root, ())):
                return True
    return False


_SWAPS = frozenset((f"{a}-", f"{b}-") for pair in SWAPPED_PREFIXES for a, b in (pair, pair[::-1])) | frozenset(
    (f"-{a}", f"-{b}") for pair in SWAPPED_SUFFIXES for a, b in (pair, pair[::-1])
)
_SUFFIXES = tuple(dict.fromkeys(["less", *(suffix for pair in SWAPPED_SUFFIXES for suffix in pair)]))
# Without these a word is related to what it was; only another one in their place makes its opposite.
_ONLY_SWAPPED = frozenset(f"-{suffix}" for suffix in _SUFFIXES if suffix != "less")
