"""The normal form of a short prompt: what capitals, white space, end punctuation and Unicode cannot change in it.

Two prompts of one form get one answer, and no policy bounds how often that is wrong. So whatever is not known to be
without meaning stays as it is written, and only a dictionary can tell that of a capital: it knows france as France
only, and both polish and Polish.
"""

import re
import unicodedata
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from cache.semantic.normal_form.english import Spelling, spelling

MAX_CHARACTERS = 240
MAX_WORDS = 40

_SIGNS = str.maketrans({"\u2019": "'", "\u2018": "'", "\u02bc": "'", "\u201c": '"', "\u201d": '"'})
_CODE_SIGNS = frozenset("{}[]<>=|\\^~")
# A token is what white space ends; white space inside a quotation is part of it.
_TOKEN = re.compile(r'(?:"[^"]*"|`[^`]*`|«[^»]*»|[^\s"`«»])+')
_WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*")
_PAYLOAD = re.compile(r":(?:\s|$)")
_END = " \t\u00a0.?!…"
_SENTENCE_END = re.compile(r"[.?!…]")
_PUNCTUATION = "),.:!?…"
_SPELT_WORD_AT_END = re.compile(r"[^\W\d_]{2}$")
# Of addresses, paths and patterns what looks like end punctuation may be a part; of 10/2 it is none.
_ADDRESS_AT_END = re.compile(r"(?=\S*[^\W\d_])\S*[/@*&]\S*$")

# Names of three letters and fewer are also units, symbols of elements, and abbreviations: Hz, Os, Io.
_SHORTEST_NAME = 4
# A full stop after a shorter word that is not frequent may be that of an abbreviation.
_SHORTEST_BEFORE_STOP = 4

# Closed classes of English grammar, complete: auxiliary verbs, of which some agree with "I", and interrogative words.
_MODALS = frozenset(("can", "could", "may", "might", "must", "shall", "should", "will", "would"))
_AUXILIARIES_OF_I = _MODALS | {"am", "did", "do", "had", "have", "was"}
_AUXILIARIES = _AUXILIARIES_OF_I | {"are", "does", "has", "is", "were"}
_IRREGULAR = frozenset(("can't", "won't", "shan't"))
_INTERROGATIVES = frozenset(("who", "whom", "whose", "what", "which", "when", "where", "why", "how"))


class _Token(NamedTuple):
    """`core` is what the punctuation `before` and `after` surrounds; `word` is it in lower case, "" if it is no word,
    and `spelling` that of the word. A word is of ASCII letters, with apostrophes between them.
    """

    before: str
    core: str
    after: str
    word: str
    spelling: Spelling


def normal_form(text: str) -> str | None:
    """The normal form of `text`, or None where only the same text has its meaning. The form is its own normal form.

    None is the answer for long texts, several lines, code, and quotations that do not end. In other texts quotations,
    what follows a colon, and everything that is no plain word are kept: numbers, identifiers, addresses, acronyms. So
    are capitals of words that the dictionary does not know or knows both ways, and all capitals of other languages.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = unicodedata.normalize("NFC", text).translate(_SIGNS).strip()
    if not text.isprintable() and not all(sign.isprintable() or sign.isspace() for sign in text):
        return None
    if len(text.splitlines()) != 1 or not _CODE_SIGNS.isdisjoint(text):
        return None
    text, payload = _without_payload(text)
    text, end = (text, "") if payload else _without_end(text)
    tokens = [_token(written) for written in _TOKEN.findall(text)]
    if len(tokens) > MAX_WORDS or not any(token.core for token in tokens):
        return None
    if any(token.core.startswith("'") for token in tokens) or _TOKEN.sub("", text).strip():
        return None  # a quotation that may not end, or does not
    is_english = _is_english(tokens)
    if end == "?" and is_english and _is_question(tokens):
        end = ""
    words = _folded(tokens) if is_english else [token.core for token in tokens]
    form = " ".join([f"{token.before}{word}{token.after}" for token, word in zip(tokens, words, strict=True)])
    return f"{form} {payload}" if payload else form + end


def _without_payload(text: str) -> tuple[str, str]:
    """The text up to the first colon that white space follows, and what is after it: that may be a quotation."""
    colon = _PAYLOAD.search(text)
    return (text[: colon.end()], text[colon.end() :].strip()) if colon else (text, "")


def _without_end(text: str) -> tuple[str, str]:
    """The text, and how it ends: "?", or "" for the other signs, which are the end of a statement or of nothing.

    Signs that may belong to what they follow stay: 5! is not 5, and an address may end with a question mark.
    """
    body = text.rstrip(_END)
    end = text[len(body) :]
    if not end or _ADDRESS_AT_END.search(body) or ("!" in end and not _SPELT_WORD_AT_END.search(body)):
        return text, ""
    return body, "?" if "?" in end else ""


def _token(written: str) -> _Token:
    core = written.lstrip("(").rstrip(_PUNCTUATION)
    before, _, after = written.partition(core) if core else ("", "", written)
    is_word = core.isascii() and (core.isalpha() or _WORD.fullmatch(core))
    word = core.lower() if is_word else ""
    return _Token(before, core, after, word, spelling(word))


def _is_english(tokens: list[_Token]) -> bool:
    """Whether most words are in the dictionary in lower case, and one of them is frequent."""
    words = sum(any(map(str.isalpha, token.core)) for token in tokens)
    plain = sum(token.spelling.plain for token in tokens)
    return 2 * plain > words and any(token.spelling.frequent for token in tokens)


def _is_question(tokens: list[_Token]) -> bool:
    """Whether the last sentence is a question without its question mark too: "It works?" is none."""
    places = [place for place, token in enumerate(tokens[:-1], 1) if token.after and _SENTENCE_END.search(token.after)]
    sentence = tokens[places[-1] if places else 0 :]
    clauses = [sentence[0], *(token for before, token in pairwise(sentence) if "," in before.after)]
    return any(_opens_question(clause.word) for clause in clauses)


def _opens_question(word: str) -> bool:
    stem = word.removesuffix("n't").partition("'")[0]
    return not _INTERROGATIVES.isdisjoint((stem, stem.removesuffix("s"))) or stem in _AUXILIARIES or word in _IRREGULAR


def _folded(tokens: list[_Token]) -> list[str]:
    """The cores, in lower case where a capital is without meaning."""
    spelt = Counter(word for word, _ in {(token.word, token.core) for token in tokens})
    return [
        token.word
        if token.word
        and token.core[0].isupper()
        and token.core[1:] == token.word[1:]
        and _is_written_either_way(tokens, place, token.spelling, spelt[token.word] == 1)
        else token.core
        for place, token in enumerate(tokens)
    ]


def _is_written_either_way(tokens: list[_Token], place: int, senses: Spelling, one_spelling: bool) -> bool:
    """Whether the capital of a word is without meaning: that of a sentence's start, or of what is only ever a name.

    Where a text has a word in several spellings (`one_spelling` is False), it may be about them.
    """
    word = tokens[place].word
    if word == "i":
        return one_spelling and _is_pronoun(tokens, place)
    if len(word) == 1 or (place and tokens[place - 1].core[-1:].isdigit()):  # a symbol or a unit
        return False
    if senses.plain:
        return _starts_sentence(tokens, place) and (senses.frequent or not (senses.name or senses.acronym))
    return senses.name and one_spelling and (len(word) >= _SHORTEST_NAME or "'" in word)


def _starts_sentence(tokens: list[_Token], place: int) -> bool:
    if tokens[place].before:
        return False
    if not place:
        return True
    last = tokens[place - 1]
    if "." in last.after and len(last.word) < _SHORTEST_BEFORE_STOP:
        return last.spelling.plain and last.spelling.frequent
    return _SENTENCE_END.search(last.after) is not None


def _is_pronoun(tokens: list[_Token], place: int) -> bool:
    """Whether "I" or "i" is no symbol: a verb follows, or an auxiliary that agrees with it is before it."""
    before = tokens[place - 1] if place else None
    after = tokens[place + 1] if place + 1 < len(tokens) else None
    if before is not None and not before.after and _agrees_with_i(before.word):
        return True
    if after is None or tokens[place].after or (before and before.word in _AUXILIARIES):
        return False
    opens_clause = before is None or bool(before.after) or before.word in _INTERROGATIVES
    return _agrees_with_i(after.word) or (after.spelling.verb and (opens_clause or after.spelling.frequent))


def _agrees_with_i(word: str) -> bool:
    return word in _AUXILIARIES_OF_I or word in _IRREGULAR or (word.endswith("n't") and not word.endswith("sn't"))
