"""Word lists of English and a few of other languages.

One file per kind of word. Uses no other room.
"""


def words(listed: str) -> frozenset[str]:
    """The words of a list written with spaces between them."""
    return frozenset(listed.split())


def in_order(listed: str) -> tuple[str, ...]:
    """The words of a list written with spaces between them, in their order."""
    return tuple(listed.split())
