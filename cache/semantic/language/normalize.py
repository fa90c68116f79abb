"""The normal form of a short natural-language prompt: what case, white space and end punctuation cannot change."""

import unicodedata

from cache.semantic.language.lexicon.grammar import FUNCTION_WORDS
from cache.semantic.language.lexicon.names import CAPITAL_NAMES, NAMES, PLAIN_WORDS_TOO

MAX_CHARACTERS = 240
MAX_WORDS = 40

_APOSTROPHES = str.maketrans({"\u2019": "'", "\u2018": "'", "\u02bc": "'"})
_END_PUNCTUATION = " .?!…"
# Besides letters and white space, what a plain sentence has.
_SENTENCE_SIGNS = frozenset("'-,.?!…")
_LATIN_END = "\u017f"
# Letters whose case or folding depends on the language: Turkish i, German sharp s, long s, and ŉ.
_SUBTLE_LETTERS = frozenset("İ\u0131ß\u017fŉ")
# "WHAT is it" is said loudly, "what is IT" asks for something else: so long are function words that are acronyms too.
_LONGEST_SPELT = 3
# However they are written, they are the same word.
_ONE_WORD = FUNCTION_WORDS | NAMES.keys()
# Words that a capital turns into another word: their case is kept.
_CASE_SENSITIVE = PLAIN_WORDS_TOO | {
    "march",
    "may",
    "august",
    "job",
    "mark",
    "bill",
    "will",
    "rose",
    "grace",
    "hope",
    "paris",
    "bath",
    "cork",
    "nice",
    "reading",
    "split",
    "mobile",
    "word",
    "excel",
    "teams",
    "outlook",
    "slack",
    "edge",
    "safari",
    "chase",
    "target",
    "gap",
    "shell",
    "subway",
    "stripe",
    "square",
    "discover",
    "swift",
    "rust",
    "ruby",
    "python",
    "java",
    "oracle",
    "basic",
    "access",
    "amazon",
    "bolt",
    "cancer",
    "chad",
    "galaxy",
    "georgia",
    "go",
    "jaguar",
    "jersey",
    "meta",
    "notion",
    "nova",
    "orange",
    "pages",
    "react",
    "signal",
    "spring",
}


def normalized(text: str) -> str | None:
    """The normal form of `text`, or None where it is not a short sentence of plain words.

    None is the answer for anything in which a letter's case, a space or a sign may matter: digits, code, quotations,
    addresses, lists, several lines, scripts other than Latin, letters that fold differently by language. The form is
    its own normal form.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = unicodedata.normalize("NFC", text.translate(_APOSTROPHES)).strip()
    if "\n" in text or "\r" in text or not all(map(_is_plain, text)):
        return None
    words = text.rstrip(_END_PUNCTUATION).split()
    if not words or len(words) > MAX_WORDS or not all(map(_is_plain_word, words)):
        return None
    if any(word.strip(_END_PUNCTUATION + ",").removesuffix("'s") in CAPITAL_NAMES for word in words):
        return None
    if text.isupper():
        return " ".join(map(str.lower, words)).rstrip(_END_PUNCTUATION)
    starts = [True, *(word[-1] in _END_PUNCTUATION for word in words)]
    return " ".join(map(_folded, words, starts)).rstrip(_END_PUNCTUATION)


def _is_plain(sign: str) -> bool:
    if sign.isalpha():
        return sign <= _LATIN_END and sign not in _SUBTLE_LETTERS and len(sign.lower()) == 1
    return sign.isspace() or sign in _SENTENCE_SIGNS


def _is_plain_word(word: str) -> bool:
    """Whether signs stand only where a sentence has them: inside or at the end, never as node.js or 'quoted'."""
    bare = word.rstrip(_END_PUNCTUATION + ",")
    return bool(bare) and bare[0].isalpha() and bare[-1].isalpha() and all(s.isalpha() or s in "'-" for s in bare)


def _folded(word: str, starts: bool) -> str:
    """In lower case, unless the case may matter: SOLID is not solid, and Gates inside a sentence are no gates.

    A capital is of no matter where it `starts` a sentence, in a function word, and in a name that is no other word.
    """
    bare = _bare(word)
    if word[0].isupper() and not starts and bare.partition("'")[0] not in _ONE_WORD:
        return word
    emphasised = len(bare) > _LONGEST_SPELT and bare in FUNCTION_WORDS
    if bare in _CASE_SENSITIVE or (word.isupper() and len(bare) > 1 and not emphasised):
        return word
    return word.lower()


def _bare(word: str) -> str:
    """The word without case and the signs around it."""
    return word.lower().strip(_END_PUNCTUATION + ",").removesuffix("'s")
