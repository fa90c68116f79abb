"""Persons."""

from cache.semantic.text import Text


def persons_differ(asked: Text, cached: Text) -> bool:
    """Whether the two are about different people's things: my name and your name, his order and her order."""
    return bool(asked.persons and cached.persons) and asked.persons.isdisjoint(cached.persons)
