"""Dates as one token: months with their day, weekdays, parts of the day, relative days, time zones."""

from collections.abc import Iterable, Sequence

from cache.semantic.lexicon import words
from cache.semantic.lexicon.calendar import (
    AMBIGUOUS_NAMES,
    BEFORE_NAMES,
    MOMENTS,
    MONTHS,
    RELATIVE,
    WEEKDAYS,
    ZONES,
)
from cache.semantic.lexicon.measures import UNITS
from cache.semantic.token import Kind, Token

_NAMES = MONTHS | WEEKDAYS | MOMENTS
_TRIGGERS = frozenset({*_NAMES, *ZONES, *RELATIVE, "this"})
_OF_TIME = words("second minute hour day night week fortnight month year decade century")


def dated(tokens: Sequence[Token]) -> list[Token]:
    """`tokens` with each date or time as one token, whose stem is "@friday", "@june 5", "@last week" or "@utc"."""
    if _TRIGGERS.isdisjoint([token.form for token in tokens]):
        return list(tokens)
    result: list[Token] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        form = token.form
        used = 1
        if form in _NAMES and (form not in AMBIGUOUS_NAMES or _is_name(tokens, position)):
            moment = _NAMES[form]
            if form in MONTHS:
                number, used = _day_or_year(tokens, position, result)
                moment += number
            result.append(Token(form, f"@{moment}", Kind.MOMENT))
        elif form in ZONES:
            result.append(Token(form, f"@{form}", Kind.MOMENT))
        elif (form in RELATIVE or form == "this") and (relative := _relative(tokens, position)):
            result.append(Token(relative, f"@{relative}", Kind.MOMENT))
            used = 2
        else:
            result.append(token)
        position += used
    return result


def moments(tokens: Iterable[Token]) -> frozenset[str]:
    """The moments named by `tokens`, which are dated."""
    return frozenset(token.stem for token in tokens if token.kind == Kind.MOMENT)


def _day_or_year(tokens: Sequence[Token], position: int, before: list[Token]) -> tuple[str, int]:
    """ " 5" for the day or year beside the month at `position`, and how many tokens from there it spans.

    A day before the month is taken back from `before`, with the "of" between them.
    """
    if position + 1 < len(tokens) and _is_bare(tokens[position + 1]):
        return f" {tokens[position + 1].form.removesuffix('th')}", 2
    back = 2 if len(before) > 1 and before[-1].form == "of" else 1
    if len(before) >= back and _is_bare(before[-back]):
        number = before[-back].form.removesuffix("th")
        del before[-back:]
        return f" {number}", 1
    return "", 1


def _is_bare(token: Token) -> bool:
    return token.kind == Kind.NUMBER and " " not in token.stem


def _is_name(tokens: Sequence[Token], position: int) -> bool:
    """Whether "may", "march", "sat" … is a time here: beside a number, or after a preposition of time."""
    before = tokens[position - 1] if position else None
    after = tokens[position + 1] if position + 1 < len(tokens) else None
    if before is not None and (before.kind == Kind.NUMBER or before.form in BEFORE_NAMES):
        return True
    return after is not None and after.kind == Kind.NUMBER


def _relative(tokens: Sequence[Token], position: int) -> str:
    """ "last week" for "last", "previous" or "past" before "week"; "" where no time follows."""
    if position + 1 == len(tokens):
        return ""
    after = tokens[position + 1].form
    unit = UNITS.get(after) or _NAMES.get(after)
    if unit is None or (after in UNITS and unit not in _OF_TIME):
        return ""
    form = tokens[position].form
    return f"{RELATIVE.get(form, form)} {unit}"
