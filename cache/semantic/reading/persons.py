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
    """The owners that `tokens` name. Who "you" and "I" are is left alone: "how do you …" asks what "how do I …" asks."""
    return frozenset(_OWNERS[token.form] for token in tokens if token.form in _OWNERS)
