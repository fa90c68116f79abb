"""Instructions on the form of the answer."""

from cache.semantic.language.text import Text


def instructions_differ(asked: Text, cached: Text) -> bool:
    """Whether the two ask for another length, format or style: "in one sentence", "as JSON", "step by step"."""
    return asked.instructions != cached.instructions
