"""What the guards compare of a prompt, computed once."""

import unicodedata
from collections.abc import Iterable

import msgspec

from cache.semantic.language.reading.dates import dates, with_dates
from cache.semantic.language.reading.instructions import instructions
from cache.semantic.language.reading.language import language
from cache.semantic.language.reading.measures import measured
from cache.semantic.language.reading.negation import negations
from cache.semantic.language.reading.numerals import with_numerals
from cache.semantic.language.reading.order import Order, order_of
from cache.semantic.language.reading.persons import Place, persons
from cache.semantic.language.reading.phrases import rewritten
from cache.semantic.language.reading.quantities import quantities
from cache.semantic.language.reading.questions import questions
from cache.semantic.language.reading.verbatim import is_sql, verbatim
from cache.semantic.language.token import Kind, Token, tokens_of

# One sign for what keyboards and phones write in several ways.
_PLAIN_SIGNS = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u02bc": "'", "\u2032": "'", "\u00ad": None, "\u200b": None, "\ufeff": None}
)
_STRIPPED = ".,;:!?\"'()[]…“”«»"
_SUBJECTS = frozenset({Kind.CONTENT, Kind.NAME, Kind.OPAQUE})


class Text(msgspec.Struct, frozen=True):
    """A prompt as the guards see it.

    `words` are its words as written, casefolded. `stems` is the set of its content words, names and addresses, each by
    one word for all inflections and synonyms; `order` says how they stand to each other. `left` and `right` are
    bit sets of the polarity axes on whose one or other side the text stands. `denied` holds the stems after a negator,
    `trouble` says that it reports a fault. Everything else is described where it is read
    (`cache/semantic/reading`).
    """

    words: tuple[str, ...]
    language: str
    stems: frozenset[str]
    names: frozenset[str]
    quantities: tuple[str, ...]
    units: frozenset[str]
    dates: frozenset[str]
    denied: frozenset[str]
    trouble: bool
    left: int
    right: int
    owners: frozenset[str]
    mentioned: tuple[str, ...]
    places: tuple[Place, ...]
    questions: frozenset[str]
    instructions: frozenset[str]
    verbatim: tuple[str, ...]
    order: Order

    @classmethod
    def of(cls, prompt: str) -> "Text":
        """Read `prompt`, any Unicode string, in time linear in its length."""
        plain = _plain(prompt)
        chunks = plain.split()
        raw = [token for chunk in chunks for token in tokens_of(chunk)]
        tokens = with_dates(measured(with_numerals(rewritten(raw))))
        amounts, units = quantities(tokens)
        denied, trouble = negations(tokens)
        left, right = _sides(tokens, denied)
        owners, mentioned, places = persons(tokens)
        return cls(
            words=tuple(filter(None, [chunk.strip(_STRIPPED).casefold() for chunk in chunks])),
            language=language(plain, raw),
            stems=frozenset([token.stem for token in tokens if token.kind in _SUBJECTS]),
            names=_names(tokens),
            quantities=amounts,
            units=units,
            dates=dates(tokens),
            denied=denied,
            trouble=trouble,
            left=left,
            right=right,
            owners=owners,
            mentioned=mentioned,
            places=places,
            questions=questions(tokens),
            instructions=instructions(tokens),
            verbatim=verbatim(plain, raw),
            order=order_of(tokens),
        )


def _plain(prompt: str) -> str:
    if not prompt.isascii():
        prompt = unicodedata.normalize("NFC", prompt.translate(_PLAIN_SIGNS))
    if ".m." in prompt or ".M." in prompt:
        for written, meant in (("a.m.", "am"), ("p.m.", "pm"), ("A.M.", "am"), ("P.M.", "pm")):
            prompt = prompt.replace(written, meant)
    # A prompt all in capitals says nothing by them.
    return prompt.lower() if prompt.isupper() and not is_sql(prompt) else prompt


def _sides(tokens: Iterable[Token], denied: frozenset[str]) -> tuple[int, int]:
    """The polarity axes on whose left and right side the text stands.

    Who names both sides of an axis stands on neither, and what is denied is for the guard on negation to judge.
    """
    left = right = 0
    for token in tokens:
        if (token.left or token.right) and token.stem not in denied:
            left |= token.left
            right |= token.right
    return left & ~right, right & ~left


def _names(tokens: Iterable[Token]) -> frozenset[str]:
    """The stems of the names: known ones however written, others by a capital inside a sentence.

    Where a function word has a capital inside a sentence it is a title, and capitals say nothing.
    """
    known: set[str] = set()
    suspected: set[str] = set()
    is_title = False
    starts = True
    for token in tokens:
        kind = token.kind
        if kind == Kind.SENTENCE_END:
            starts = True
            continue
        if kind == Kind.NAME:
            known.add(token.stem)
        elif token.capital and not starts:
            if kind == Kind.CONTENT:
                suspected.add(token.stem)
            elif kind == Kind.FUNCTION and token.form != "i":
                is_title = True
        starts = False
    return frozenset(known if is_title else known | suspected)
