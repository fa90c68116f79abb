"""Whose things a prompt is about."""

from collections.abc import Iterable

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


def persons(tokens: Iterable[Token]) -> frozenset[str]:
    """The owners that `tokens` name. "You" and "I" are left alone: "how do you …" is "how do I …"."""
    return frozenset(_OWNERS[token.form] for token in tokens if token.form in _OWNERS)
