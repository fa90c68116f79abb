"""A question as its words, and what of it must be equal letter for letter.

No knowledge of any language is needed, but of capitals and "n't" in English.
"""

import re
import unicodedata

import msgspec

from cache.semantic.normal_form.english import spelling
from cache.semantic.wording.verbatim import UNDIVIDED, verbatim

MAX_WORDS = 100
"""Sentence embedding models cut texts at 128 to 256 tokens; a text of so many words is not cut."""

# One sign for what keyboards and phones write in several ways.
_PLAIN_SIGNS = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u02bc": "'", "\u2013": "-", "\u00ad": None, "\u200b": None, "\ufeff": None}
)
# A minus, a product, a bracket or a factorial beside a digit, and an option of a command: -20, 10 - 2, 5!, rm -f.
_OPERATOR = r"(?:(?<=\d)|(?<=\d\s))[-*()!]|[-*()](?=\s?\d)|(?<!\S)-(?=\w)|(?<!\S)\*(?!\S)"
_WORD = re.compile(rf"\d+(?:[.,:]\d+)*|[{UNDIVIDED}]|(?:(?![{UNDIVIDED}])[^\W\d])+|{_OPERATOR}|(?![-*()!])[^\w\s]")
_NOT = re.compile(r"n't\b", re.IGNORECASE)
# Where a capital says nothing: before it there is nothing, or what may end a sentence.
_START = re.compile(r"(?:^|[.!?:;\u2026]|\n)[\W_]*\Z")
# So many characters back at most.
_LOOKED_BACK = 8
_SILENT = frozenset(
    ".,;:?\"'[]{}\u2026\u2014\u00bf\u00a1\u3001\u3002\u300a\u300b\u300c\u300d\u300e\u300f\u201c\u201d\u201e\u00ab\u00bb_~`"
)
# What the compatibility form would make other numbers of: x² is not x2, and 1½ is not 11/2.
_RAISED = {"<super>": "^", "<sub>": "_", "<fraction>": " "}


class Text(msgspec.Struct, frozen=True):
    """A question as it is compared.

    `written` is the question, `words` its words, numbers and symbols, casefolded and in their order, but for capitals
    that make another word (US and us); `verbatim` are the parts that another question must have letter for letter to
    get the same answer.
    """

    written: str
    words: tuple[str, ...]
    verbatim: tuple[str, ...]

    @classmethod
    def of(cls, question: str) -> "Text":
        """Read `question`, any Unicode string, in time linear in its length but for long runs of combining marks."""
        plain = question.translate(_PLAIN_SIGNS)
        read = plain if plain.isascii() else unicodedata.normalize("NFKC", _spelt_out(plain))
        read = _NOT.sub(" not", read)
        found = [(each[0], each[0].casefold(), each.start()) for each in _WORD.finditer(read)]
        capitals = sum(written != word for written, word, _ in found)
        # Where most words have one, as in a title, capitals say nothing.
        keeps = 0 < 2 * capitals <= len(found)
        words = tuple(
            written if keeps and written != word and _is_another_word(written, word, read, start) else word
            for written, word, start in found
            if word not in _SILENT
        )
        return cls(plain, words, verbatim(plain))


def _is_another_word(written: str, word: str, text: str, start: int) -> bool:
    """Whether a capital within a sentence makes a name or an acronym of a frequent word: US, May, IT, WHO."""
    if len(word) == 1 or not word.isascii():
        return False
    known = spelling(word)
    meaning = known.acronym if written.isupper() else known.name
    return known.frequent and meaning and not _START.search(text, max(0, start - _LOOKED_BACK), start)


def _spelt_out(text: str) -> str:
    return "".join(
        _RAISED.get(unicodedata.decomposition(sign).partition(" ")[0], "") + sign if sign > "\x7f" else sign
        for sign in text
    )
