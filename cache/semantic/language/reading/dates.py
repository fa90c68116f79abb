"""Dates as one token: months with their day, weekdays, parts of the day, relative days, time zones."""

from collections.abc import Iterable, Sequence

from cache.semantic.language.lexicon import words
from cache.semantic.language.lexicon.calendar import (
    AMBIGUOUS_NAMES,
    BEFORE_NAMES,
    MOMENTS,
    MONTHS,
    RELATIVE,
    WEEKDAYS,
    ZONES,
)
from cache.semantic.language.lexicon.measures import UNITS
from cache.semantic.language.token import Kind, Token

_NAMES = MONTHS | WEEKDAYS | MOMENTS
_TRIGGERS = frozenset({*_NAMES, *ZONES, *RELATIVE, "this"})
# A number of four digits in this range is a year, wherever it stands.
_FIRST_YEAR, _LAST_YEAR = "1500", "2099"
_OF_TIME = words("second minute hour day night week fortnight month year decade century")


def with_dates(tokens: Sequence[Token]) -> list[Token]:
    """`tokens` with each date or time as one token; its stem is "@friday", "@june 5", "@1995", "@last week", "@utc"."""
    if _TRIGGERS.isdisjoint([token.form for token in tokens]) and Kind.NUMBER not in [token.kind for token in tokens]:
        return list(tokens)
    result: list[Token] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        form = token.form
        used = 1
        if form in _NAMES and (form not in AMBIGUOUS_NAMES or _is_name(tokens, position)):
            moment = _NAMES[form]
            day = year = ""
            if form in MONTHS:
                day, year, used = _day_and_year(tokens, position, result)
            result.append(Token(form, f"@{moment}{day}", Kind.MOMENT))
            if year:
                result.append(_year(year))
        elif form in ZONES:
            result.append(Token(form, f"@{form}", Kind.MOMENT))
        elif (form in RELATIVE or form == "this") and (relative := _relative(tokens, position)):
            result.append(Token(relative, f"@{relative}", Kind.MOMENT))
            used = 2
        elif _is_year(token):
            result.append(_year(form))
        else:
            result.append(token)
        position += used
    return result


def dates(tokens: Iterable[Token]) -> frozenset[str]:
    """The moments named by `tokens`, which are dated."""
    return frozenset(token.stem for token in tokens if token.kind == Kind.MOMENT)


def _day_and_year(tokens: Sequence[Token], position: int, before: list[Token]) -> tuple[str, str, int]:
    """ " 5" and "1995" for the day and year beside the month at `position`, and how many tokens they span from there.

    "5 June 1995" is "June 5, 1995". A day before the month is taken back from `before`, with the "of" between them.
    """
    day, end = "", position + 1
    back = 2 if len(before) > 1 and before[-1].form == "of" else 1
    if len(before) >= back and _is_day(before[-back]):
        day = before[-back].form.removesuffix("th")
        del before[-back:]
    elif end < len(tokens) and _is_day(tokens[end]):
        day = tokens[end].form.removesuffix("th")
        end += 1
    # A comma may stand before the year.
    year = end + (end < len(tokens) and tokens[end].form in (",", "of"))
    if year < len(tokens) and _is_year(tokens[year]):
        return day and f" {day}", tokens[year].form, year + 1 - position
    return day and f" {day}", "", end - position


def _is_day(token: Token) -> bool:
    return _is_bare(token) and len(token.form.removesuffix("th")) <= 2


def _is_year(token: Token) -> bool:
    return (
        _is_bare(token) and len(token.form) == 4 and token.form.isdecimal() and _FIRST_YEAR <= token.form <= _LAST_YEAR
    )


def _year(written: str) -> Token:
    return Token(written, f"@{written}", Kind.MOMENT)


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
