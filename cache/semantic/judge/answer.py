"""An answer's features for the default judge, computed once per text."""

import re
import unicodedata
from dataclasses import dataclass

from cache.semantic.language.lexicon import words
from cache.semantic.language.text import Text
from cache.semantic.language.token import Kind, tokens_of

MAX_CHARACTERS = 4000
"""Longer answers are compared for equality only: reading them takes milliseconds, and one fact has little weight."""
PASSAGE = 900
"""Characters that an embedding model reads completely: it truncates after 256 tokens."""
# Each is compared with each of the other answer's; later ones count only in the whole text.
_MAX_SENTENCES = 64

_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n]*\n(.*?)(?:^[ \t]*(?:```|~~~)[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_MARKER = re.compile(r"^[ \t]*(?:[-*+•]|\d{1,2}[.)]|#{1,6}|>)[ \t]+", re.MULTILINE)
_EMPHASIS = re.compile(r"\*\*|__|(?<!\w)[*_](?=\w)|(?<=\w)[*_](?!\w)")
_RANGE = re.compile(r"(?<=\d)\s*[-\u2013\u2212]\s*(?=\d)")
_SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+|\n+")
# The parts of code that are facts: options and calls. Names of variables change with the wording.
_CALL = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*|[A-Za-z_][\w.]*(?=\()|HEAD~\d+|[<>=!]=+|[A-Za-z]+(?=\s+\w+\s*\{)")
_COMMENT = re.compile(r"(?<!\S)(?:#|//|--)[ ].*$|/\*.*?\*/", re.MULTILINE)

_NEGATORS = words(
    "no not never neither nor none nothing nobody nowhere without cannot unable unfortunately impossible refuse "
    "forbidden prohibited unavailable closed"
)
FUNCTION_WORDS = _NEGATORS | words(
    "only except unless until both either before after above below over under more less fewer minimum maximum most "
    "least every each all always free must may optional required first last second within instead also still again "
    "twice once same different together alone left right up down earlier later earliest latest inside outside next "
    "previous exactly per half double any some other to from by for and or if when while do does don't doesn't isn't "
    "aren't can can't"
)
"""Small words that change the meaning of a sentence; most lists of stop words have them."""

_YES = words("yes yep sure certainly absolutely correct indeed right")
_NO = words("no nope unfortunately sorry incorrect wrong")
_CONTENTS = frozenset({Kind.CONTENT, Kind.NAME, Kind.OPAQUE, Kind.INSTRUCTION})
_CLOCK = re.compile(r"@(\d{1,2}):(\d\d)")
_VAGUE = words("@morning @afternoon @evening @night @weekend @today @now")
_NO_FACTS = frozenset({"1", "0", ""})
_MARKS = frozenset({Kind.SYMBOL, Kind.CLAUSE_END, Kind.SENTENCE_END})
_STRIPPED = ".,;:!?()[]{}\"'“”‘’…*`"  # noqa: RUF001  # the signs that are meant


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence, line or list item: content words, negators, facts, and sides of the polarity axes."""

    contents: frozenset[str]
    negators: int
    facts: frozenset[str]
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The compared features.

    `passages` are its plain text, without Markdown and blocks of code, cut to what an embedding model reads at once.
    `sequence` are its words in their order, content words by their stems; `contents` the stems alone. `facts` are its
    numbers, hours and dates, `code` the calls and options in its code, `labels` its bold text. `lead` is 1 if it begins
    with a yes, -1 with a no, else 0.
    """

    passages: tuple[str, ...]
    sequence: tuple[str, ...]
    contents: frozenset[str]
    sentences: tuple[Sentence, ...]
    names: frozenset[str]
    facts: frozenset[str]
    code: frozenset[str]
    labels: frozenset[str]
    negators: int
    lead: int
    left: int
    right: int

    @classmethod
    def of(cls, text: str) -> "Answer":
        """Read `text`, of at most MAX_CHARACTERS; about two milliseconds for a hundred words."""
        code = "\n".join([*_FENCE.findall(text), *_SPAN.findall(text)])
        plain = _plain(text)
        read = Text.of(plain)
        low = _words(plain)
        sequence = _sequence(plain)
        return cls(
            passages=passages_of(plain),
            sequence=tuple(word for word, _ in sequence),
            contents=_contents(sequence),
            sentences=tuple(_sentence(part) for part in _SENTENCE_END.split(plain)[:_MAX_SENTENCES] if part.strip()),
            names=read.names,
            facts=_facts(read),
            code=frozenset(_CALL.findall(_COMMENT.sub("", code))),
            labels=frozenset(label.strip(_STRIPPED).casefold() for label in _BOLD.findall(text)),
            negators=_negators(low),
            lead=_lead(low),
            left=read.left,
            right=read.right,
        )


def passages_of(plain: str) -> tuple[str, ...]:
    """`plain` cut at white space into as few passages of at most PASSAGE characters as possible; at least one."""
    passages = [""]
    for part in re.findall(r"\S+\s*", plain):
        if len(passages[-1]) + len(part) > PASSAGE and passages[-1]:
            passages.append("")
        passages[-1] += part
    return tuple(passage.strip() for passage in passages)


def facts_of(plain: str) -> frozenset[str]:
    """The facts of a text without Markdown, such as a question."""
    return _facts(Text.of(plain))


def _facts(read: Text) -> frozenset[str]:
    """The numbers, hours and dates, in a comparable form: "10", "5.30" for 17:30, "sunday".

    Units are left out, since another answer may omit them ("between nine and five"), and so is the number one.
    """
    found = {amount[1:].partition(" ")[0] for amount in read.quantities if amount.startswith("#")}
    for moment in read.dates - _VAGUE:
        clock = _CLOCK.match(moment)
        if clock:
            minutes = clock[2] if clock[2] != "00" else ""
            found.add(f"{int(clock[1]) % 12 or 12}" + (minutes and f".{minutes}"))
        else:
            found.update(part.lstrip("#@").removesuffix("th") for part in moment.split())
    return frozenset({fact.removesuffix("th").replace(":", ".") for fact in found} - _NO_FACTS)


def _sequence(plain: str) -> list[tuple[str, bool]]:
    """The words, and whether each is a content word."""
    tokens = [token for chunk in plain.split() for token in tokens_of(chunk) if token.kind not in _MARKS]
    return [(token.stem, True) if token.kind in _CONTENTS else (token.form, False) for token in tokens]


def _contents(sequence: list[tuple[str, bool]]) -> frozenset[str]:
    return frozenset(stem for stem, is_content in sequence if is_content)


def _words(plain: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip(_STRIPPED).casefold() for word in plain.split())))


def _plain(text: str) -> str:
    text = _FENCE.sub("\n", text)
    text = _MARKER.sub("", _SPAN.sub(r"\1", text))
    return _RANGE.sub(" to ", _EMPHASIS.sub("", text)).strip()


def _sentence(part: str) -> Sentence:
    read = Text.of(part)
    return Sentence(_contents(_sequence(part)), _negators(_words(part)), _facts(read), read.left, read.right)


def _negators(low: tuple[str, ...]) -> int:
    return sum(word in _NEGATORS or word.endswith(("n't", "n\u2019t")) for word in low)


def _lead(low: tuple[str, ...]) -> int:
    if not low:
        return 0
    return (low[0] in _YES) - (low[0] in _NO)


def equal(one: str, other: str) -> bool:
    """Whether two answers are the same text except for Unicode form, line ends and trailing white space.

    Case, spaces inside lines and signs count: in code they are facts.
    """
    return one == other or _canonical(one) == _canonical(other)


def _canonical(text: str) -> str:
    lines = unicodedata.normalize("NFC", text).splitlines()
    return "\n".join(line.rstrip() for line in lines).strip()
