"""Negation."""

from cache.semantic.language.reading.negation import SUCCESSES
from cache.semantic.language.text import Text


def negations_differ(asked: Text, cached: Text) -> bool:
    """Whether one of the two denies what the other does not.

    One report of a fault may be put as a denial and another not ("has not arrived", "is still missing"): that is let
    pass where the other text names a trouble and does not say the denied word at all.
    """
    if not asked.denied and not cached.denied:
        return False
    if asked.denied and cached.denied:
        return _contradicts(asked, cached) or _contradicts(cached, asked)
    denying, affirming = (asked, cached) if asked.denied else (cached, asked)
    if _contradicts(denying, affirming):
        return True
    return not (affirming.trouble and denying.denied <= SUCCESSES)


def _contradicts(denying: Text, other: Text) -> bool:
    """Whether `other` says without a negation what `denying` denies."""
    return not (denying.denied - other.denied).isdisjoint(other.stems)
