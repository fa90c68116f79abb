"""Persons."""

from cache.semantic.text import Text


def persons_differ(asked: Text, cached: Text) -> bool:
    """Whether the two are about different people's things (my name, your name), or "I" and "you" change places."""
    if asked.owners and cached.owners and asked.owners.isdisjoint(cached.owners):
        return True
    return bool(asked.speaker and cached.speaker) and asked.speaker != cached.speaker
