"""Persons."""

from cache.semantic.text import Text


def persons_differ(asked: Text, cached: Text) -> bool:
    """Whether the two are about different people's things (my name, your name), or two persons change places."""
    if asked.owners and cached.owners and asked.owners.isdisjoint(cached.owners):
        return True
    ours, theirs = asked.mentioned, cached.mentioned
    if ours == theirs or len(ours) < 2 or len(theirs) < 2:
        return False
    return [person for person in ours if person in theirs] != [person for person in theirs if person in ours]
