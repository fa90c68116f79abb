"""Numbers and units."""

from cache.semantic.text import Text


def numbers_differ(asked: Text, cached: Text) -> bool:
    """Whether the two have not the same quantities, each with its unit, or ask for different units.

    "5 mg" and "0.5 mg", "5 mg" and "5 ml", "in miles" and "in kilometres". A quantity that only one has counts. Units
    that only one names do not: "how long, in days" may be "how long".
    """
    if asked.quantities != cached.quantities:
        return True
    return not (asked.units <= cached.units or cached.units <= asked.units)
