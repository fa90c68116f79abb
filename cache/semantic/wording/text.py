"""A question as its words, and what of it must be equal letter for letter. No knowledge of any language is needed."""

import re
import unicodedata

import msgspec

from cache.semantic.wording.verbatim import UNDIVIDED, verbatim

MAX_WORDS = 100
"""Sentence embedding models cut texts at 128 to 256 tokens; a text of so many words is not cut."""

# One sign for what keyboards and phones write in several ways.
_PLAIN_SIGNS = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u02bc": "'", "\u00ad": None, "\u200b": None, "\ufeff": None}
)
_WORD = re.compile(rf"\d+(?:[.,:]\d+)*|[{UNDIVIDED}]|(?:(?![{UNDIVIDED}])[^\W\d])+|[^\w\s]")
_NOT = re.compile(r"n't\b")
_SILENT = frozenset(
    ".,;:!?\"'()[]{}\u2026\u2013\u2014-\u00bf\u00a1\u3001\u3002\u300a\u300b\u300c\u300d\u300e\u300f\u201c\u201d\u201e\u00ab\u00bb*_~`"
)


class Text(msgspec.Struct, frozen=True):
    """A question as it is compared.

    `written` is the question, `words` its words, numbers and symbols, casefolded and in their order; `verbatim` are the
    parts that another question must have letter for letter to get the same answer.
    """

    written: str
    words: tuple[str, ...]
    verbatim: tuple[str, ...]

    @classmethod
    def of(cls, question: str) -> "Text":
        """Read `question`, any Unicode string, in time linear in its length."""
        plain = question.translate(_PLAIN_SIGNS)
        folded = unicodedata.normalize("NFKC", plain).casefold()
        words = [word for word in _WORD.findall(_NOT.sub(" not", folded)) if word not in _SILENT]
        return cls(plain, tuple(words), verbatim(plain))
