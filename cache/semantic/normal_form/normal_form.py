"""The normal form of a short prompt: what capitals, white space, end punctuation and Unicode cannot change in it.

Two prompts of one form get one answer, and no policy bounds how often that is wrong. So whatever is not known to be
without meaning stays as it is written, and only a dictionary can tell that of a capital: it knows france as France
only, and both polish and Polish.
"""

import re
import unicodedata
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
# What follows the first colon may be a quotation.
_PAYLOAD = re.compile(r"(?<=:)\s+")
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


# Stands before the first token and after the last one: no word, and as the end of a sentence.
_EDGE = _Token("", "", "!", "", Spelling())


def normal_form(text: str) -> str | None:
    """The normal form of `text`, or None where only the same text has its meaning. The form is its own normal form.

    None is the answer for long texts, several lines, code, and quotations that do not end. In other texts quotations,
    what follows a colon, and everything that is no plain word are kept: numbers, identifiers, addresses, acronyms. So
    are capitals of words that the dictionary does not know or knows both ways, and all capitals of other languages.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = unicodedata.normalize("NFC", text).translate(_SIGNS).strip()
    if len(text.splitlines()) != 1 or not "".join(text.split()).isprintable() or not _CODE_SIGNS.isdisjoint(text):
        return None
    text, *payload = _PAYLOAD.split(text, maxsplit=1)
    text, end = (text, "") if payload else _without_end(text)
    tokens = [_token(written) for written in _TOKEN.findall(text)]
    words = [token.core for token in tokens]
    if len(words) > MAX_WORDS or not any(words):
        return None
    if any(word.startswith("'") for word in words) or _TOKEN.sub("", text).strip():
        return None  # a quotation that may not end, or does not
    if _is_english(tokens):
        words = _folded(tokens)
        if end and _is_question(tokens):
            end = ""
    written = [f"{token.before}{word}{token.after}" for token, word in zip(tokens, words, strict=True)]
    return " ".join([*written, *payload]) + end


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
    word = core.lower() if core.isascii() and (core.isalpha() or _WORD.fullmatch(core)) else ""
    return _Token(before, core, after, word, spelling(word))


def _is_english(tokens: list[_Token]) -> bool:
    """Whether most words are in the dictionary in lower case, and one of them is frequent."""
    words = sum(token.word != "" or any(map(str.isalpha, token.core)) for token in tokens)
    plain = sum(token.spelling.plain for token in tokens)
    return 2 * plain > words and any(token.spelling.frequent for token in tokens)


def _is_question(tokens: list[_Token]) -> bool:
    """Whether the last sentence is a question without its question mark too: "It works?" is none."""
    places = [place for place, token in enumerate(tokens[:-1], 1) if _SENTENCE_END.search(token.after)]
    sentence = tokens[places[-1] if places else 0 :]
    clauses = [sentence[0], *(token for before, token in pairwise(sentence) if "," in before.after)]
    return any(_opens_question(clause.word) for clause in clauses)


def _opens_question(word: str) -> bool:
    stem = word.removesuffix("n't").partition("'")[0]
    return not _INTERROGATIVES.isdisjoint((stem, stem.removesuffix("s"))) or stem in _AUXILIARIES or word in _IRREGULAR


def _folded(tokens: list[_Token]) -> list[str]:
    """The cores, in lower case where a capital is without meaning."""
    spellings = [core.lower() for core in {token.core for token in tokens}]
    words = []
    for before, token, after in zip([_EDGE, *tokens[:-1]], tokens, [*tokens[1:], _EDGE], strict=True):
        has_capital = token.core == token.word.capitalize()
        is_folded = has_capital and _is_written_either_way(before, token, after, spellings.count(token.word) == 1)
        words.append(token.word if is_folded else token.core)
    return words


def _is_written_either_way(before: _Token, token: _Token, after: _Token, one_spelling: bool) -> bool:
    """Whether the capital of a word is without meaning: that of a sentence's start, or of what is only ever a name.

    Where a text has a word in several spellings (`one_spelling` is False), it may be about them.
    """
    word, senses = token.word, token.spelling
    if word == "i":
        return one_spelling and _is_pronoun(before, token, after)
    if len(word) == 1 or before.core[-1:].isdigit():  # a symbol or a unit
        return False
    if senses.plain:
        starts_sentence = not token.before and _ends_sentence(before)
        return starts_sentence and (senses.frequent or not (senses.name or senses.acronym))
    return senses.name and one_spelling and (len(word) >= _SHORTEST_NAME or "'" in word)


def _ends_sentence(token: _Token) -> bool:
    if "." in token.after and len(token.word) < _SHORTEST_BEFORE_STOP:
        return token.spelling.plain and token.spelling.frequent
    return _SENTENCE_END.search(token.after) is not None


def _is_pronoun(before: _Token, token: _Token, after: _Token) -> bool:
    """Whether "I" or "i" is no symbol: a verb follows, or an auxiliary that agrees with it is before it."""
    if not before.after and _agrees_with_i(before.word):
        return True
    if token.after or before.word in _AUXILIARIES:
        return False
    opens_clause = bool(before.after) or before.word in _INTERROGATIVES
    return _agrees_with_i(after.word) or (after.spelling.verb and (opens_clause or after.spelling.frequent))


def _agrees_with_i(word: str) -> bool:
    return word in _AUXILIARIES_OF_I or (word.endswith("n't") and not word.endswith("sn't"))
