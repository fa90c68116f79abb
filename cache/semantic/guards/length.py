"""Texts too long for an embedding to see."""

from cache.semantic.language.text import Text

# Sentence embedding models cut at 128 to 256 tokens; below this many words the cut is not reached.
MAX_WORDS = 100


def too_long_to_embed(asked: Text, cached: Text) -> bool:
    """Whether one of the two is longer than an embedding sees and their words are not the same."""
    return max(len(asked.words), len(cached.words)) > MAX_WORDS and asked.words != cached.words
