"""Named entities."""

from cache.semantic.language.text import Text


def entities_differ(asked: Text, cached: Text) -> bool:
    """Whether one of the two names something that the other does not mention.

    A name counts as mentioned however it is written: many users write without capitals.
    """
    return not (asked.names <= cached.stems and cached.names <= asked.stems)
