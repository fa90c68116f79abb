"""What the guards know about English, as plain word lists: closed classes in full, open ones by their commonest words.

A word that is missing makes a guard refuse more or a list match less, never the other way round on purpose: synonyms
make two texts equal and are kept to words that can replace each other in a question; antonyms make them different.
"""


def words(listed: str) -> frozenset[str]:
    """The words of a list written with spaces between them."""
    return frozenset(listed.split())


def in_order(listed: str) -> tuple[str, ...]:
    """The words of a list written with spaces between them, in their order."""
    return tuple(listed.split())
