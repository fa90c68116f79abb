"""Instructions on the form of an answer: its length, format, style, and kind of text."""

from collections.abc import Iterable

from cache.semantic.language.token import Kind, Token


def instructions(tokens: Iterable[Token]) -> frozenset[str]:
    """The instructions on form in `tokens`, by one name each."""
    return frozenset(token.stem for token in tokens if token.kind == Kind.INSTRUCTION)
