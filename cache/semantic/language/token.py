"""A chunk of a prompt, which is what white space divides, as tokens. Each distinct chunk is analysed once."""

import re
import unicodedata
from functools import lru_cache
from typing import Final, NamedTuple

from cache.semantic.language.lemma import lemma
from cache.semantic.language.lexicon import words
from cache.semantic.language.lexicon.antonyms import AXES
from cache.semantic.language.lexicon.forms import FORMS
from cache.semantic.language.lexicon.grammar import CONTRACTED, CONTRACTIONS, FUNCTION_WORDS, LIGHT_WORDS, NEGATORS
from cache.semantic.language.lexicon.measures import AMBIGUOUS_UNITS, UNITS
from cache.semantic.language.lexicon.names import CAPITAL_NAMES, COMMON_ABBREVIATIONS, NAMES
from cache.semantic.language.lexicon.synonyms import REPRESENTATIVE

# A chunk longer than this is an address, a blob or a script without spaces: it is compared whole.
MAX_CHUNK = 64
# The last letter of the Latin blocks that European languages use.
LATIN_END = "\u024f"
# Chunks and words are kept by the number, each below a kilobyte.
_KEPT = 8192


class Kind:
    """The kinds of token. Plain integers: members of an Enum take a call of Python code to hash."""

    FUNCTION: Final = 0
    LIGHT: Final = 1
    INSTRUCTION: Final = 2
    CONTENT: Final = 3
    NAME: Final = 4
    NUMBER: Final = 5
    MOMENT: Final = 6
    OPAQUE: Final = 7
    SYMBOL: Final = 8
    CLAUSE_END: Final = 9
    SENTENCE_END: Final = 10


# The kinds that say what a prompt is about.
CARRIERS = frozenset({Kind.CONTENT, Kind.NAME, Kind.NUMBER, Kind.MOMENT, Kind.OPAQUE})


class Token(NamedTuple):
    """One word, number or mark.

    `form` is casefolded, `stem` stands for the form's inflections, spellings and synonyms. `left` and `right` are bit
    sets of the polarity axes on whose one or other side the word lies. `glued`: no white space before it.
    """

    form: str
    stem: str
    kind: int
    capital: bool = False
    glued: bool = False
    left: int = 0
    right: int = 0


# Of the groups that meet in one lemma the first in the list counts.
STEMS: dict[str, str] = {lemma(word): lemma(first) for word, first in reversed(list(REPRESENTATIVE.items()))}
_LIGHT_STEMS = frozenset(map(lemma, LIGHT_WORDS))
# In joined words these say something of their own and stay with what follows: pre-tax, non-refundable, e-mail.
_JOINED = re.compile(
    r"(?<![^\W_])(anti|co|e|ex|inter|intra|mid|multi|non|post|pre|re|semi|self|sub|un|wi)-(?=[^\W\d_])", re.IGNORECASE
)
_PIECE = re.compile(r"[^\W\d_]+(?:['&][^\W\d_]+)*|\d+(?:[.,:]\d+)*|[^\w\s]|_")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_PARENTHESISED = re.compile(r"(?<=\d)\(([a-z])\)", re.IGNORECASE)
_ADDRESS = re.compile(r"://|^www\.|[^@\s]@[^@\s]+\.|^[~.]{0,2}/[^/]+/|^[a-z]:\\|\\\w", re.IGNORECASE)
_SENTENCE_ENDS = frozenset(".?!…。\uff1f\uff01")
_ABBREVIATED = words("dr. mr. mrs. ms. prof. st. vs. rs. approx. etc. jr. sr. inc. ltd. e.g. i.e.")
_CLAUSE_ENDS = frozenset(",;:()\u2013—\uff0c\uff1b\uff1a、")
_SILENT = frozenset("'\"`-“”\u2018«»„\u201a*_~¿¡\N{VARIATION SELECTOR-16}")
_CURRENCY_SIGNS = frozenset("$£€¥₹₩₽₿%°")
_IS_CONTRACTED = words("what where who how that there it he she when why here")


def _sides() -> dict[str, tuple[int, int]]:
    sides: dict[str, tuple[int, int]] = {}
    for axis, (left, right) in enumerate(AXES):
        for side, to_left in ((left, True), (right, False)):
            # The word itself and what stands for it: whichever the text's token turns out to carry.
            for stem in {form for word in side for form in (word, lemma(word), STEMS.get(lemma(word), word))}:
                before = sides.get(stem, (0, 0))
                bit = 1 << axis
                sides[stem] = (before[0] | bit, before[1]) if to_left else (before[0], before[1] | bit)
    # Synonyms that fell together on both sides of an axis say nothing on it.
    return {stem: (left & ~right, right & ~left) for stem, (left, right) in sides.items()}


SIDES = _sides()


def _side(form: str, base: str, stem: str) -> tuple[int, int]:
    """The axes of a word: its own and its lemma's, or else those of what stands for it."""
    own, general = SIDES.get(form, (0, 0)), SIDES.get(base, (0, 0))
    left, right = own[0] | general[0], own[1] | general[1]
    return (left, right) if left or right else SIDES.get(stem, (0, 0))


@lru_cache(_KEPT)
def word(form: str, capital: bool = False, glued: bool = False) -> Token:
    """The token of one casefolded word."""
    base = lemma(form)
    stem = STEMS.get(base, base)
    left, right = _side(form, base, stem)
    if form in FUNCTION_WORDS or form in NEGATORS:
        kind, stem = Kind.FUNCTION, form
    elif form in FORMS:
        kind, stem = Kind.INSTRUCTION, FORMS[form]
    elif form in NAMES:
        kind, stem = Kind.NAME, NAMES[form]
    elif form in UNITS and form not in AMBIGUOUS_UNITS:
        kind, stem = Kind.CONTENT, UNITS[form]
    elif form in LIGHT_WORDS or stem in _LIGHT_STEMS:
        kind = Kind.LIGHT
    elif not form.isascii() and any(letter > LATIN_END for letter in form):
        # Beyond Latin no inflection is known: the word is what it is.
        kind = Kind.NAME
    else:
        kind = Kind.CONTENT
    return Token(form, stem, kind, capital and form not in COMMON_ABBREVIATIONS, glued, left, right)


POSSESSIVE = Token("'s", "'s", Kind.FUNCTION, glued=True)


def tokens_of(chunk: str) -> tuple[Token, ...]:
    """The tokens of a chunk without white space; an address, a path or a blob is one opaque token."""
    return _tokens(chunk) if len(chunk) <= MAX_CHUNK else (_opaque(chunk),)


@lru_cache(_KEPT)
def _tokens(chunk: str) -> tuple[Token, ...]:
    if chunk.isascii() and chunk.isalpha():
        return _words(chunk, glued=False)
    if _ADDRESS.search(chunk):
        bare = chunk.rstrip(".,;:!?)\"'>]")
        return (_opaque(bare), *_pieces(chunk[len(bare) :]))
    if chunk.lower().startswith(".net"):
        chunk = "dot" + chunk[1:]
    return tuple(_pieces(_PARENTHESISED.sub(r"\1", _JOINED.sub(r"\1", chunk))))


def _opaque(chunk: str) -> Token:
    return Token(chunk, chunk, Kind.OPAQUE)


def _pieces(chunk: str) -> list[Token]:
    tokens: list[Token] = []
    named_until = 0
    for match in _PIECE.finditer(chunk):
        piece, start = match.group(), match.start()
        glued = start > 0
        if start < named_until:
            continue
        if piece[0].isdecimal():
            number = plain_number(piece)
            if start and chunk[start - 1] in "-\u2212" and (start == 1 or not chunk[start - 2].isalnum()):
                number = f"-{number}"
            tokens.append(Token(number, f"#{number}", Kind.NUMBER, glued=glued))
        elif piece[0].isalnum():
            suffix = _suffix_of_name(piece, chunk[match.end() : match.end() + 2])
            if suffix:
                named_until = match.end() + len(suffix)
                name = piece.casefold() + suffix
                tokens.append(Token(name, name, Kind.NAME, glued=glued))
            else:
                tokens.extend(_words(piece, glued))
        elif mark := _mark(chunk, start):
            tokens.append(mark)
    return tokens


def _suffix_of_name(piece: str, rest: str) -> str:
    """The signs after the letter of C++ and C#."""
    if len(piece) > 1:
        return ""
    return "++" if rest == "++" else "#" if rest[:1] == "#" else ""


def _mark(chunk: str, start: int) -> Token | None:
    mark = chunk[start]
    glued = start > 0
    if mark in "/&" and _is_between_words(chunk, start):
        return word("and" if mark == "&" else "or")
    if mark in _SENTENCE_ENDS:
        inside = mark == "." and glued and start + 1 < len(chunk) and chunk[start + 1].isalnum()
        return None if inside or chunk.casefold() in _ABBREVIATED else Token(mark, mark, Kind.SENTENCE_END, glued=glued)
    if mark in _CLAUSE_ENDS or chunk == "-":
        return Token(mark, mark, Kind.CLAUSE_END, glued=glued)
    if mark in _CURRENCY_SIGNS:
        return word(mark, glued=glued)
    between_numbers = glued and start + 1 < len(chunk) and chunk[start - 1].isdecimal() and chunk[start + 1].isdecimal()
    if mark in _SILENT and not between_numbers and chunk not in ("*", "~"):
        return None
    return Token(mark, mark, Kind.SYMBOL, glued=glued)


def _is_between_words(chunk: str, start: int) -> bool:
    """Whether the mark at `start` stands between two words, in one chunk or beside it: tummy/belly, Tom & Jerry."""
    if chunk == "&":
        return True
    before, after = chunk[:start], chunk[start + 1 :]
    return before[-2:].isalpha() and after[:2].isalpha() and len(before) > 1 and len(after) > 1


def _words(piece: str, glued: bool) -> tuple[Token, ...]:
    """The tokens of one run of letters, contractions taken apart."""
    form = piece.casefold()
    if piece in CAPITAL_NAMES:
        return (Token(form, CAPITAL_NAMES[piece], Kind.NAME, capital=True, glued=glued),)
    if form in CONTRACTIONS:
        return tuple(word(part) for part in CONTRACTIONS[form])
    # Capitals after the first letter count too: iPhone, eBay.
    capital = piece != piece.lower()
    base, apostrophe, ending = form.rpartition("'")
    if not apostrophe:
        return (word(form, capital, glued),)
    if ending == "s":
        if base in _IS_CONTRACTED:
            return (word(base, capital, glued), word("is"))
        return (word(base.replace("'", ""), capital, glued), POSSESSIVE)
    if ending in CONTRACTED and "'" not in base:
        return (word(base, capital and base != "i", glued), word(CONTRACTED[ending]))
    return (word(form.replace("'", ""), capital, glued),)


def plain_number(written: str) -> str:
    """A number in ASCII digits without separators of thousands; versions, dates and clock times stay as written."""
    if not written.isascii():
        written = "".join(str(unicodedata.decimal(sign)) if sign.isdecimal() else sign for sign in written)
    return written.replace(",", "") if _GROUPED.fullmatch(written) else written
