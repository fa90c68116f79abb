"""Persons."""

from cache.semantic.text import Text

_OWN = {frozenset({"mine"}): "I", frozenset({"yours"}): "you"}


def persons_differ(asked: Text, cached: Text) -> bool:
    """Whether the two are about different people's things (my name, your name), or two persons change places.

    How you do something with your things is how I do it with mine.
    """
    if asked.owners and cached.owners and asked.owners.isdisjoint(cached.owners):
        return not (_asks_for_anybody(asked) and _asks_for_anybody(cached))
    ours, theirs = asked.mentioned, cached.mentioned
    if ours == theirs or len(ours) < 2 or len(theirs) < 2:
        return False
    return [person for person in ours if person in theirs] != [person for person in theirs if person in ours]


def _asks_for_anybody(text: Text) -> bool:
    """Whether `text` asks how one does something with what is one's own, whether it says I and my or you and your."""
    own = _OWN.get(text.owners)
    return own is not None and "how" in text.questions and set(text.mentioned) <= {own}
