"""Languages."""

from cache.semantic.language.reading.language import ENGLISH
from cache.semantic.language.text import Text


def languages_differ(asked: Text, cached: Text) -> bool:
    """Whether the two are in different languages, or in one whose negations and opposites the guards cannot read.

    Texts in such a language agree only word for word.
    """
    if asked.language != cached.language:
        return True
    return asked.language != ENGLISH and asked.words != cached.words
