"""A question as its words, and what of it must be equal letter for letter: quotations, code, a text to work on,
addresses, identifiers.

No knowledge of any language is needed, but of capitals and "n't" in English.
"""

import re
import unicodedata
from collections.abc import Collection

import msgspec

from cache.semantic.normal_form.english import spelling

# Scripts that do not divide words: Thai to Burmese, Khmer, Chinese and Japanese. Each sign counts as a word.
_UNDIVIDED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# One sign for what keyboards and phones write in several ways, and for the one mark that case folding makes a letter.
_PLAIN_SIGNS = str.maketrans("\u2019\u2018\u02bc\u2013\u0345", "'''-\u03b9", "\u00ad\u200b\ufeff")
# A minus, a product, a bracket or a factorial beside a digit, and an option of a command: -20, 10 - 2, 5!, rm -f.
_OPERATOR = r"(?:(?<=\d)|(?<=\d\s))[-*()!]|[-*()](?=\s?\d)|(?<!\S)-(?=\w)|(?<!\S)\*(?!\S)"
_WORD = re.compile(rf"\d+(?:[.,:]\d+)*|[{_UNDIVIDED}]|(?:(?![{_UNDIVIDED}])[^\W\d])+|{_OPERATOR}|(?![-*()!])[^\w\s]")
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
_SIGN = re.compile(f"[{_UNDIVIDED}]")
_QUOTED = re.compile(
    r"\"([^\"]*)\"|“([^“”]*)”|«([^«»]*)»|„([^„“”]*)[“”]|「([^「」]*)」|『([^『』]*)』|`([^`]*)`|(?<!\w)'([^'\n]*)'(?!\w)"
)
# Any of these, and the whole text is taken for code.
_CODE = re.compile(
    r"```|~~~|[{};]\s*\n|\{\s*\}|=>|->|==|!=|<=|>=|:=|&&|\|\||</|/>|"
    r"#include|\w\(\)|\bdef \w{1,64}\(|\bfunction\s?\w{0,64}\(|"
    r"\bimport \w{1,64}\n|\bclass \w{1,64}[:(]|\n(?: {4}|\t)\S|^\s*[$>] \S|"
    r"\w\[\w{0,20}\]|\w\+\+[;)]|\bSELECT\s.{0,200}\sFROM\b"
)
_OPAQUE = re.compile(
    r"://|^www\.|[^@\s]@[^@\s]+\.|^[~.]{0,2}/[^/]+/|^[a-zA-Z]:\\|\\\w|[^\W_]_+[^\W_]|[^\W\d_][a-z][A-Z]|^[\w.+-]*\w\.\w+\.\w"
)
# None of these signs, and no part has to be equal. An apostrophe between letters, which many questions have, is none.
_SUSPICIOUS = re.compile(r"[`~{}\[;=<>&|#(\n:\uff1a\"“«„「『@/\\_]|(?<!\w)'|SELECT|[a-z][A-Z]|\w\.\w")
# With the full-width signs of Chinese and Japanese: ideographic comma and full stop, then , ; : ! ? ( ).
_STRIPPED = ".,;:!?\"'()…“”«»「」『』\u3001\u3002\uff0c\uff1b\uff1a\uff01\uff1f\uff08\uff09"
_COLON = re.compile(r": |(?<!\d)\uff1a")
# A longer part is not sought among the words: it is a text, not a quotation.
_MAX_QUOTED = 24


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
        return cls(plain, words, _verbatim(plain))


def _is_another_word(written: str, word: str, text: str, start: int) -> bool:
    """Whether a capital within a sentence makes a name or an acronym of a frequent word: US, May, IT, WHO."""
    known = spelling(word)
    has_meaning = len(word) > 1 and known.frequent and (known.acronym if written.isupper() else known.name)
    return has_meaning and not _START.search(text, max(0, start - _LOOKED_BACK), start)


def _spelt_out(text: str) -> str:
    return "".join(
        _RAISED.get(unicodedata.decomposition(sign).partition(" ")[0], "") + sign if sign > "\x7f" else sign
        for sign in text
    )


def _verbatim(text: str) -> tuple[str, ...]:
    """The parts of `text` that must be equal, in their order; all of it where it is code."""
    if not _SUSPICIOUS.search(text):
        return ()
    if _CODE.search(text):
        return (text.strip(),)
    parts = [chunk.strip(_STRIPPED) for chunk in _SIGN.sub(" ", text).split() if _OPAQUE.search(chunk)]
    parts += [part.strip() for match in _QUOTED.finditer(text) for part in match.groups() if part]
    if payload := _payload(text):
        parts.append(payload)
    return tuple(parts)


def are_said(parts: Collection[str], written: str) -> bool:
    """Whether all of `parts` stand in a text: plain words may be quoted in one text and not in the other."""
    said = f" {' '.join(word.strip(_STRIPPED) for word in _divided(written))} "
    return all(
        0 < len(sought) <= _MAX_QUOTED
        and all(word.replace("'", "").isalpha() for word in sought)
        and f" {' '.join(sought)} " in said
        for sought in map(_divided, parts)
    )


def _divided(text: str) -> list[str]:
    return _SIGN.sub(r" \g<0> ", text.casefold()).split()


def _payload(text: str) -> str:
    """What follows the first line or the first ": ", as "Summarize:" and "Translate to French: good night" have it."""
    head, newline, body = text.strip().partition("\n")
    _, *rest = _COLON.split(head, maxsplit=1)
    return " ".join((rest[0] + newline + body if rest else body).split()).rstrip(" .?!\u3002\uff1f\uff01")
