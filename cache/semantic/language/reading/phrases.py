"""Phrases: word groups that stand for one word, lead-ins that say nothing, greetings and thanks around a question."""

from collections.abc import Sequence

from cache.semantic.language.lexicon.grammar import EXPLETIVES, POLITENESS
from cache.semantic.language.lexicon.phrases import PHRASES
from cache.semantic.language.token import Kind, Token, word

_FIRST_WORDS = frozenset(first for first, _ in PHRASES)
_MARKS = frozenset({Kind.CLAUSE_END, Kind.SENTENCE_END})


def rewritten(tokens: Sequence[Token]) -> list[Token]:
    """`tokens` without politeness, with each known phrase replaced by what stands for it."""
    polite_free = [token for token in tokens if token.form not in EXPLETIVES]
    forms = [token.form for token in polite_free]
    result: list[Token] = []
    position, last = 0, len(forms) - 1
    while position <= last:
        form = forms[position]
        choices = PHRASES.get((form, forms[position + 1])) if form in _FIRST_WORDS and position < last else None
        for length, rest, replacement in choices or ():
            if tuple(forms[position + 2 : position + length]) == rest:
                result.extend(map(word, replacement))
                position += length
                break
        else:
            result.append(polite_free[position])
            position += 1
    return _without_courtesies(result)


def _without_courtesies(tokens: list[Token]) -> list[Token]:
    """Cut "hi, …" and "…, thanks!". Between other words they are asked about: how do you say thanks in French."""
    start, end = 0, len(tokens)
    while start < end and _is_courtesy(tokens[start]):
        start += 1
    while end > start and _is_courtesy(tokens[end - 1]):
        end -= 1
    # Nothing but courtesies: they are the message.
    return tokens[start:end] if start < end else tokens


def _is_courtesy(token: Token) -> bool:
    return token.form in POLITENESS or token.kind in _MARKS
