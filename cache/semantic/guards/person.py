"""Persons."""

from cache.semantic.language.reading.persons import Place
from cache.semantic.language.text import Text

_OWN = {frozenset({"mine"}): "I", frozenset({"yours"}): "you"}
# These are who talk, or anybody: how you do it is how I do it.
_WHO_TALK = frozenset({"I", "you", "we"})


def persons_differ(asked: Text, cached: Text) -> bool:
    """Whether the two are about different people (they, we) or their things (my name, your name), or change places.

    Two persons may change places with each other, and one with what the same words name: "can I sue the bank", "can the
    bank sue me". How you do something with your things is how I do it with mine.
    """
    if asked.owners and cached.owners and asked.owners.isdisjoint(cached.owners):
        return not (_asks_for_anybody(asked) and _asks_for_anybody(cached))
    ours, theirs = asked.mentioned, cached.mentioned
    if asked.stems == cached.stems and ours and theirs:
        if ours == theirs and any(map(_are_turned, asked.places, cached.places)):
            return True
        if _others(ours) != _others(theirs):
            return True
    if len(ours) < 2 or len(theirs) < 2:
        return False
    return [person for person in ours if person in theirs] != [person for person in theirs if person in ours]


def _are_turned(ours: Place, theirs: Place) -> bool:
    """Whether a person stands before other words, and is not clearly the subject in both texts, nor the object."""
    return ours[0] != theirs[0] and (ours[1] != theirs[1] or not ours[1])


def _others(persons: tuple[str, ...]) -> frozenset[str]:
    return frozenset(persons) - _WHO_TALK


def _asks_for_anybody(text: Text) -> bool:
    """Whether `text` asks how one does something with what is one's own, whether it says I and my or you and your."""
    own = _OWN.get(text.owners)
    return own is not None and "how" in text.questions and set(text.mentioned) <= {own}
