"""Quantities of a prompt: its numbers with their units, and the units it asks for."""

from collections.abc import Iterable

from cache.semantic.language.lexicon.measures import AMBIGUOUS_UNITS, AMOUNT_WORDS, UNITS
from cache.semantic.language.token import Kind, Token

_NAMED = AMOUNT_WORDS | (UNITS.keys() - AMBIGUOUS_UNITS)


def quantities(tokens: Iterable[Token]) -> tuple[tuple[str, ...], frozenset[str]]:
    """The sorted quantities ("#5 milligram", "#20", "half") and the units named with or without a number.

    `tokens` are measured and dated: what is a time of day or a date is no quantity.
    """
    found: list[str] = []
    units: set[str] = set()
    for token in tokens:
        if token.kind == Kind.NUMBER:
            found.append(token.stem)
            _, _, unit = token.stem.partition(" ")
            if unit:
                units.add(unit)
        elif token.form in _NAMED:
            if token.form in AMOUNT_WORDS:
                found.append(token.form)
            else:
                units.add(token.stem)
    found.sort()
    return tuple(found), frozenset(units)
