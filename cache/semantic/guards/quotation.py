"""Quotations, code, a text to work on, addresses and symbols."""

from cache.semantic.language.text import Text

# A longer part is not sought: it would take quadratic time.
_MAX_WORDS = 24


def quotations_differ(asked: Text, cached: Text) -> bool:
    """Whether what the two quote or carry differs in one letter: every letter of it may decide the answer.

    Plain words that one puts in quotation marks, or after a colon, may stand in the other without them.
    """
    if asked.verbatim == cached.verbatim:
        return False
    ours, theirs = frozenset(asked.verbatim), frozenset(cached.verbatim)
    if ours == theirs:
        return True
    return not (_all_said(ours - theirs, cached) and _all_said(theirs - ours, asked))


def _all_said(parts: frozenset[str], by: Text) -> bool:
    return all(_is_said(part, by.words) for part in parts)


def _is_said(part: str, words: tuple[str, ...]) -> bool:
    """Whether the plain words of `part` stand in `words` beside each other."""
    sought = tuple(part.casefold().split())
    if not 0 < len(sought) <= _MAX_WORDS or not all(map(_is_plain, sought)) or sought[0] not in words:
        return False
    return any(words[start : start + len(sought)] == sought for start in range(len(words) - len(sought) + 1))


def _is_plain(word: str) -> bool:
    return word.replace("'", "").replace("-", "").isalpha()
