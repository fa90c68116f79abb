"""Dates and times."""

from cache.semantic.language.text import Text


def dates_differ(asked: Text, cached: Text) -> bool:
    """Whether the two name different moments: days, months, times of day, time zones, "last week" and "next week"."""
    return asked.dates != cached.dates
