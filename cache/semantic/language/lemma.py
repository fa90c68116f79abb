"""The lemma of an English word: one form for its inflections and for British and American spelling.

A light stemmer in the manner of Harman's S stemmer (1991) with the participles of Porter (1980): it only has to map the
forms of one word to one string and different words to different strings, so that its results need not be words.
"""

from cache.semantic.language.lexicon.irregular import IRREGULAR, UNCHANGED

_VOWELS = frozenset("aeiouy")
# Plurals in -es whose base ends in a sibilant.
_SIBILANT_ES = ("sses", "xes", "ches", "shes", "zzes")
_MIN_LATINATE = 8  # letters from which -ion is taken for a suffix: donation, not nation


def lemma(word: str) -> str:
    """The lemma of a casefolded `word`; a word with anything but ASCII letters is its own."""
    known = IRREGULAR.get(word)
    if known is not None:
        return _without_ending(known)
    if len(word) < 4 or word in UNCHANGED or not (word.isascii() and word.isalpha()):
        return word
    bare = _singular(word)
    if bare in UNCHANGED:
        return bare
    if bare in IRREGULAR:
        return _without_ending(IRREGULAR[bare])
    return _without_ending(_american(_without_participle(bare)))


def _singular(word: str) -> str:
    if not word.endswith("s") or word.endswith(("ss", "us", "is")):
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(_SIBILANT_ES):
        return word[:-2]
    return word[:-1]


def _without_participle(word: str) -> str:
    for suffix in ("ing", "ed"):
        if not word.endswith(suffix) or word.endswith("eed"):
            continue
        if suffix == "ed" and word.endswith("ied"):
            return word[:-3] + "y"
        rest = word[: -len(suffix)]
        if len(rest) < 2 or _VOWELS.isdisjoint(rest):
            return word
        if len(rest) > 3 and rest[-1] == rest[-2] and rest[-1] not in "lsfz":
            return rest[:-1]
        # making, used: a short stem of consonant, vowel, consonant has lost its e.
        if len(rest) == 3 and rest[1] in _VOWELS and rest[0] not in _VOWELS and rest[2] not in "aeiouywx":
            return rest + "e"
        return rest
    return word


def _american(word: str) -> str:
    if len(word) >= 6:
        for british, american in (("isation", "ization"), ("ise", "ize"), ("yse", "yze"), ("is", "iz"), ("ys", "yz")):
            # The last two: what participles leave of -ise and -yse.
            if word.endswith(british):
                return word[: -len(british)] + american
        if "our" in word[2:]:
            head, _, tail = word[2:].rpartition("our")
            if tail in ("", "ite", "it", "ful", "able", "ably", "al", "hood") and (head or tail):
                return word[:2] + head + "or" + tail
    return word


def _without_ending(word: str) -> str:
    if len(word) >= 6 and word.endswith("ly"):
        if word.endswith("ically"):
            return word[:-4]
        word = word[:-3] + "y" if word.endswith("ily") else word[:-2]
    if len(word) >= _MIN_LATINATE and word.endswith(("ation", "ction", "ution", "ition", "ption")):
        return word[:-3]
    if len(word) >= 6 and word.endswith("ll"):
        return word[:-1]
    if len(word) >= 5 and word.endswith("e"):
        return word[:-1]
    return word
