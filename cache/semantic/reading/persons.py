"""Whose things a prompt is about."""

from collections.abc import Sequence

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


_PERSONS = {
    "i": "I",
    "me": "I",
    "we": "we",
    "us": "we",
    "you": "you",
    "he": "he",
    "him": "he",
    "she": "she",
    "her": "she",
    "they": "they",
    "them": "they",
}


def persons(tokens: Sequence[Token]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The owners that `tokens` name, and the persons in the order of their first mention.

    A person alone says little: "how do you …" asks what "how do I …" asks.
    """
    owners = frozenset([_OWNERS[token.form] for token in tokens if token.form in _OWNERS])
    return owners, tuple(dict.fromkeys([_PERSONS[token.form] for token in tokens if token.form in _PERSONS]))
