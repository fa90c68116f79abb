"""An answer as the default judge reads it, once per text."""

import re
import textwrap
import unicodedata
from collections import Counter
from typing import Literal, NamedTuple

from cache.semantic.wording.comparison import NEGATIONS

MAX_CHARACTERS = 4000
"""Longer answers are compared for equality only: reading them takes milliseconds, and one fact has little weight."""
PASSAGE = 900
"""Characters that an embedding model reads completely: it truncates after 256 tokens."""

_SHORT = 120
# Items, rows or code that make up so much of an answer's lines, or characters, give it their class.
_MOSTLY = 0.5

AnswerClass = Literal["short", "structured", "prose", "code"]
"""Classes of answers that judges find easy or hard to compare."""

_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n]*\n(.*?)(?:^[ \t]*(?:```|~~~)[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r"[ \t]*(?:[-*+•|{}\[\]\"<]|\d{1,2}[.)] )")
_MARKER = re.compile(r"^[ \t]*(?:[-*+•]|\d{1,2}[.)]|#{1,6}|>)[ \t]+", re.MULTILINE)
_EMPHASIS = re.compile(r"`|\*\*|__|(?<!\w)[*_](?=\w)|(?<=\w)[*_](?!\w)")
_RANGE = re.compile(r"(?<=\d)\s*[-\u2013\u2212]\s*(?=\d)")
_WORD = re.compile(r"\d+(?:[.,:]\d+)*|[^\W\d_]+(?:['\u2019][^\W\d_]+)*")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:[.,:]\d+)*")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_PASSAGES = textwrap.TextWrapper(
    PASSAGE, expand_tabs=False, replace_whitespace=False, break_long_words=False, break_on_hyphens=False
)


class Answer(NamedTuple):
    """The compared parts.

    `passages` are its text without Markdown, cut to what an embedding model reads at once. `words` are all words in
    their order, and `counts` how often each occurs. `numbers` are in one form ("1,000" is "1000", "18:00" is "18").
    `negations` is how many words are in NEGATIONS or end with "n't"; Chinese and Japanese ones are not found, since
    those texts are not divided into words here.
    """

    passages: tuple[str, ...]
    words: tuple[str, ...]
    counts: Counter[str]
    numbers: frozenset[str]
    negations: int

    @classmethod
    def of(cls, text: str) -> "Answer":
        """Read `text`, of at most MAX_CHARACTERS."""
        plain = _RANGE.sub(" to ", _EMPHASIS.sub("", _MARKER.sub("", unicodedata.normalize("NFC", text)))).strip()
        words = tuple(word.casefold() for word in _WORD.findall(plain))
        # A sign counts: options of commands have one.
        numbers = frozenset(_number(found) for found in _NUMBER.findall(_THOUSANDS.sub("", plain)))
        passages = tuple(_PASSAGES.wrap(plain))
        negations = sum(word in NEGATIONS or word.endswith(("n't", "n\u2019t")) for word in words)
        return cls(passages or ("",), words, Counter(words), numbers, negations)


def class_of(text: str) -> AnswerClass:
    """The class of an answer; JSON, tables and lists are structured."""
    if sum(map(len, _FENCE.findall(text))) > _MOSTLY * len(text):
        return "code"
    lines = [line for line in text.splitlines() if line.strip()]
    if sum(bool(_ITEM.match(line)) for line in lines) > _MOSTLY * len(lines):
        return "structured"
    return "short" if len(text) <= _SHORT else "prose"


def _number(found: str) -> str:
    """In a comparable form."""
    parts = found.replace(",", ".").removesuffix(":00").partition(".")
    return parts[0] + (f".{decimals}" if (decimals := parts[2].rstrip("0")) else "")


def equal(one: str, other: str) -> bool:
    """Whether two answers are the same text except for Unicode form, line ends and trailing white space.

    Case, spaces inside lines and signs count: in code they are facts.
    """
    return one == other or _canonical(one) == _canonical(other)


def _canonical(text: str) -> str:
    return "\n".join(map(str.rstrip, unicodedata.normalize("NFC", text).splitlines())).strip()
