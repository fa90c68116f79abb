"""Numbers in words as number tokens: "two hundred and five", "a million", "5 thousand", "third"."""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from cache.semantic.language.lexicon import words
from cache.semantic.language.lexicon.measures import MULTIPLIERS, NUMBER_WORDS, ORDINALS, UNITS
from cache.semantic.language.token import Kind, Token

_NUMERALS = frozenset({*ORDINALS, *NUMBER_WORDS, *MULTIPLIERS})
_BEFORE_A_UNIT = words("a an per every each split this last of")
# Longer figures are identifiers; scaling them would only cost time.
_MAX_DIGITS = 15


def with_numerals(tokens: Sequence[Token]) -> list[Token]:
    """`tokens` with each number in words as one number token."""
    if _NUMERALS.isdisjoint([token.form for token in tokens]):
        return list(tokens)
    result: list[Token] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if token.form in ORDINALS and not _is_second_of_time(tokens, position):
            result.append(number_token(ORDINALS[token.form]))
            position += 1
        elif _starts_number(tokens, position):
            value, position = _spelled(tokens, position)
            result.append(number_token(value))
        elif token.kind == Kind.NUMBER and position + 1 < len(tokens) and tokens[position + 1].form in MULTIPLIERS:
            result.append(number_token(scaled(token.form, MULTIPLIERS[tokens[position + 1].form]), token.glued))
            position += 2
        else:
            result.append(token)
            position += 1
    return result


def number_token(value: str, glued: bool = False) -> Token:
    return Token(value, f"#{value}", Kind.NUMBER, glued=glued)


def scaled(figure: str, multiplier: int) -> str:
    """`figure` times `multiplier`, both exact; a figure that is no plain decimal is returned as it is with a mark."""
    if len(figure) > _MAX_DIGITS:
        return f"{figure}*{multiplier}"
    try:
        product = Decimal(figure) * multiplier
    except InvalidOperation:
        return f"{figure}*{multiplier}"
    return str(int(product)) if product == int(product) else str(product.normalize())


def _is_second_of_time(tokens: Sequence[Token], position: int) -> bool:
    if tokens[position].form != "second" or position == 0:
        return False
    before = tokens[position - 1]
    return before.kind == Kind.NUMBER or before.form in _BEFORE_A_UNIT or before.form in NUMBER_WORDS


def _starts_number(tokens: Sequence[Token], position: int) -> bool:
    form = tokens[position].form
    if form != "one":
        return form in NUMBER_WORDS or form in MULTIPLIERS
    # "which one", "no one": a number only before what can be counted or multiplied.
    after = tokens[position + 1].form if position + 1 < len(tokens) else ""
    return after in UNITS or after in MULTIPLIERS


def _spelled(tokens: Sequence[Token], position: int) -> tuple[str, int]:
    """The value of the number in words at `position` and the position after it."""
    total, group, last = 0, 0, 1_000
    any_word = False
    while position < len(tokens):
        form = tokens[position].form
        if form in MULTIPLIERS:
            multiplier = MULTIPLIERS[form]
            if multiplier == 100 and group >= 100:
                break
            if multiplier == 100:
                group = max(group, 1) * 100
            else:
                total, group = total + max(group, 1) * multiplier, 0
            last = 1_000
        elif form in NUMBER_WORDS and (form != "one" or any_word or _starts_number(tokens, position)):
            value = NUMBER_WORDS[form]
            # Only ones follow tens: "five six" are two numbers, "twenty six" is one.
            if any_word and not (last >= 100 or (last >= 20 and value < 10)):
                break
            group, last = group + value, value
        elif (
            form == "and"
            and last >= 100
            and any_word
            and position + 1 < len(tokens)
            and tokens[position + 1].form in NUMBER_WORDS
        ):
            pass
        else:
            break
        any_word = True
        position += 1
    return str(total + group), position
