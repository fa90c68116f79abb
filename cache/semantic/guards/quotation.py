"""Quotations, code, a text to work on, addresses and symbols."""

from cache.semantic.text import Text


def quotations_differ(asked: Text, cached: Text) -> bool:
    """Whether what the two quote or carry differs in one letter: every letter of it may decide the answer."""
    return asked.verbatim != cached.verbatim
