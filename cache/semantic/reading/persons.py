"""Whose things a prompt is about."""

from collections.abc import Sequence

from cache.semantic.lexicon import words
from cache.semantic.token import Token

_OWNERS = {
    "my": "mine",
    "mine": "mine",
    "our": "mine",
    "ours": "mine",
    "your": "yours",
    "yours": "yours",
    "his": "his",
    "her": "hers",
    "hers": "hers",
    "their": "theirs",
    "theirs": "theirs",
}


_FIRST = words("i me")
_SECOND = words("you")


def persons(tokens: Sequence[Token]) -> tuple[frozenset[str], str]:
    """The owners that `tokens` name, and which of "I" and "you" comes first where both do.

    A text with one of them alone says little: "how do you …" asks what "how do I …" asks.
    """
    owners = frozenset([_OWNERS[token.form] for token in tokens if token.form in _OWNERS])
    order = [token.form in _FIRST for token in tokens if token.form in _FIRST or token.form in _SECOND]
    return owners, "" if len(set(order)) < 2 else "me first" if order[0] else "you first"
