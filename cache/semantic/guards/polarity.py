"""Opposites: enable and disable, buy and sell, cheapest and most expensive."""

from cache.semantic.language.text import Text


def polarities_differ(asked: Text, cached: Text) -> bool:
    """Whether on some axis the two stand on different sides."""
    return bool(asked.left & cached.right or asked.right & cached.left)
