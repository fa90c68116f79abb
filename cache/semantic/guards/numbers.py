"""Numbers and units."""

from cache.semantic.language.lexicon import words
from cache.semantic.language.text import Text

# In a longer story they may be said of anything.
_RESTRICTING = words("only another")


def numbers_differ(asked: Text, cached: Text) -> bool:
    """Whether the two have not the same quantities, each with its unit, or ask for different units.

    "5 mg" and "0.5 mg", "5 mg" and "5 ml", "in miles" and "in kilometres". A quantity that only one has counts, and so
    does "only" in one of two sentences of the same words. Units that only one names do not: "how long, in days" may be
    "how long".
    """
    if asked.quantities != cached.quantities:
        return True
    if asked.stems == cached.stems and not _RESTRICTING.isdisjoint({*asked.words} ^ {*cached.words}):
        return True
    return not (asked.units <= cached.units or cached.units <= asked.units)
