"""Numbers as one token with their unit: "$5m", "5 mg", "1st", "7 pm"."""

from collections.abc import Sequence

from cache.semantic.language.lexicon import words
from cache.semantic.language.lexicon.measures import SHORT_UNITS, SUFFIXES, UNITS
from cache.semantic.language.reading.numerals import scaled
from cache.semantic.language.token import Kind, Token

_SIGNS = frozenset("$£€¥₹₩₽₿")
# Before a figure they are its unit: Rs 500, USD 20.
_CODES = words("rs inr usd eur gbp jpy cny")
_ORDINAL_ENDINGS = frozenset({"st", "nd", "rd", "th"})
# A million after a currency, a metre after a length.
_SCALED_MONEY = frozenset({"m", "b"})
_HALVES = frozenset({"am", "pm"})
_NO_TOKEN = Token("", "", Kind.FUNCTION)


def measured(tokens: Sequence[Token]) -> list[Token]:
    """`tokens` with each number and its unit as one, and each time of day as one moment.

    A quantity's stem is "#5 milligram", "#20" or "#1st"; a moment's is "@17:00".
    """
    if Kind.NUMBER not in [token.kind for token in tokens]:
        return list(tokens)
    result: list[Token] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token.kind != Kind.NUMBER:
            result.append(token)
            continue
        after = tokens[position] if position < len(tokens) else _NO_TOKEN
        clock = clock_time(token.form, after.form)
        if clock:
            result.append(Token(clock, f"@{clock}", Kind.MOMENT))
            position += after.form in _HALVES or after.form == "oclock"
            continue
        sign = result[-1].form if result and token.glued and result[-1].form in _SIGNS else ""
        figure, unit = token.form, ""
        if after.glued and after.form in SUFFIXES and (after.form not in _SCALED_MONEY or sign):
            figure = scaled(figure, SUFFIXES[after.form])
            position += 1
            after = tokens[position] if position < len(tokens) else _NO_TOKEN
        code = "" if sign or not result or after.form in UNITS else result[-1].form
        if sign or code in _CODES:
            result.pop()
            unit = UNITS[sign or code]
        elif after.glued and after.form in _ORDINAL_ENDINGS:
            figure += "th"
            position += 1
        elif after.form in UNITS or (after.glued and after.form in SHORT_UNITS):
            unit = UNITS.get(after.form) or SHORT_UNITS[after.form]
            position += 1
        result.append(Token(figure, f"#{figure} {unit}" if unit else f"#{figure}", Kind.NUMBER, glued=token.glued))
    return result


def clock_time(figure: str, after: str) -> str:
    """ "17:00" for `figure` "5" or "5:00" before "pm"; "" for what is no time of day."""
    hour, colon, minute = figure.partition(":")
    if not (colon or after in _HALVES or after == "oclock") or not hour.isdecimal() or len(hour) > 2:
        return ""
    if colon and not (minute.isdecimal() and len(minute) == 2):
        return ""
    value = int(hour)
    if after in _HALVES and 1 <= value <= 12:
        value = value % 12 + (12 if after == "pm" else 0)
    elif value <= 12:
        # Morning or evening, nobody knows: a time of its own.
        return f"{value}:{minute or '00'} of either half"
    return f"{value}:{minute or '00'}"
