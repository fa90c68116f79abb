"""How English words are written, by a dictionary and a frequency list: english.txt.gz.

`scripts/english_words.py` makes the file and says what its marks mean. It is read at the first question, or by `load`.
"""

import functools
import gzip
from importlib import resources
from typing import NamedTuple


class Spelling(NamedTuple):
    """How a word is written inside a sentence; nothing is true of an unknown one.

    Attributes:
        plain: in lower case: polish, not france.
        name: with a capital: Polish, France.
        acronym: in capitals: AIDS, not Polish.
        verb: it is, or looks like, the base or the past of a verb.
        frequent: it is one of the thousand most frequent words; none of them is better known as a name.
    """

    plain: bool = False
    name: bool = False
    acronym: bool = False
    verb: bool = False
    frequent: bool = False


_UNKNOWN = Spelling()


def spelling(word: str) -> Spelling:
    """Of a word in lower case, of ASCII letters with apostrophes between them; of a possessive, that of its word."""
    known = load()
    return known.get(word) or known.get(word.removesuffix("'s"), _UNKNOWN)


@functools.cache
def load() -> dict[str, Spelling]:
    """The words, which are read once."""
    packed = resources.files(__package__).joinpath("english.txt.gz").read_bytes()
    words = dict(map(str.split, gzip.decompress(packed).decode().splitlines()))
    spellings = {marks: Spelling(*(mark in marks for mark in "pnavf")) for marks in set(words.values())}
    return {word: spellings[marks] for word, marks in words.items()}
