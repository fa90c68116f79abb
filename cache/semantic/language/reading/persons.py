"""Whose things a prompt is about."""

from collections.abc import Sequence

from cache.semantic.language.token import Kind, Token

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


# What a person does, and what is done to one; of you and her the form does not tell.
_SUBJECTS = {"i": 1, "we": 1, "he": 1, "she": 1, "they": 1}
_OBJECTS = {"me": 2, "us": 2, "him": 2, "them": 2}
_CASES = _SUBJECTS | _OBJECTS
_COUNTED = frozenset({Kind.CONTENT, Kind.NAME, Kind.OPAQUE})

Place = tuple[int, int]
"""How many content words and names stand before a person, and the case: 1 for I, 2 for me, 0 where the form does not
tell."""


def persons(tokens: Sequence[Token]) -> tuple[frozenset[str], tuple[str, ...], tuple[Place, ...]]:
    """The owners that `tokens` name, the persons in the order of their first mention, and where each is mentioned.

    A person alone says little: "how do you …" asks what "how do I …" asks.
    """
    owners = frozenset([_OWNERS[token.form] for token in tokens if token.form in _OWNERS])
    places: dict[str, Place] = {}
    before = 0
    for token in tokens:
        if token.form in _PERSONS:
            places.setdefault(_PERSONS[token.form], (before, _CASES.get(token.form, 0)))
        elif token.kind in _COUNTED:
            before += 1
    return owners, tuple(places), tuple(places.values())
