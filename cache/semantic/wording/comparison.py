"""A question compared with several that have one answer: which of them vouches, or what forbids it.

Two rules, and no list of words but that of negations:

- **Near-copies** (see `difference`) are looked at strictly. A number, a unit, a negation or the order of the words that
  differs is a veto. A word that was removed and that all questions with this answer have is one: it is what they ask
  about. A word that was added and that none of them has is one too; but from MIN_QUESTIONS on it is a feature, whose
  weight the traffic teaches.
- **Of other questions**, no word is a veto, unless one of them has but a word or two and none in common with the other.
  Another language is one.

Of both, quotations and code that differ are a veto, and so is a length that embeddings do not see.
"""

import functools
from collections.abc import Sequence, Set
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

from cache.semantic.wording.language import language_of
from cache.semantic.wording.text import Text, are_said

FEATURE_NAMES = ("replaced", "inserted", "overlap", "novelty", "overlap²", "novelty²")
"""In the order of `TextComparison.features`."""
VETOES = ("language", "verbatim", "length", "numbers", "negation", "order", "words")
"""All names of vetoes."""
MIN_QUESTIONS = 2
"""So many questions with one answer are enough to leave an added word to the policy."""
MAX_WORDS = (3, 5)
"""Near-copies differ in no more words than these, on the one side and on the other, ..."""
MAX_SPANS = 2
"""... which stand in no more places than these; ..."""
MIN_SHARED = 0.5
"""... and at least this share of their words is common (Dice's coefficient)."""

# Differences: those of the questions that are asked most are looked for again and again.
_KEPT = 16_384
# So many words that change places are sought at a time, beside so many others that were added or removed.
_MOST_SWAPPED = 3
_FILLERS = 2
# To Unicode also the signs of other words are numeric, such as that of "what" (什么), which once meant ten.
_CHINESE_NUMERALS = frozenset("〇零一二三四五六七八九十百千万亿两萬億兩")
# Sentence embedding models cut texts at 128 to 256 tokens; a text of so many words is not cut.
_LONGEST = 100
# Signs that are words only beside a number or as the option of a command.
_OPERATORS = frozenset("-*()!^")
# A text of so few words says too little to be told from another one that has none of them; it may have none that the
# embedding model knows, and then all such texts have one vector.
_SHORT = 2
NEGATIONS = frozenset(
    word
    for line in (
        "not no never without none neither nor nothing nobody cannot",  # English
        "nicht kein keine keinen keiner keinem nie ohne",  # German
        "pas sans jamais aucun aucune",  # French
        "no nunca sin ninguno ninguna jamás",  # Spanish
        "não sem nunca nenhum",  # Portuguese
        "non senza mai",  # Italian
        "niet geen nooit zonder",  # Dutch
        "nie bez",  # Polish
        "не нет без ні",  # Russian, Ukrainian
        "değil",  # Turkish
        "不 没 沒 無 无 非 未",  # Chinese, Japanese
    )
    for word in line.split()
)
"""A negation of another language is a word as all others are."""


class Difference(NamedTuple):
    """How the words of one question became those of another.

    `added` and `removed` are words of which the one or the other has more. `substituted` are those of them that stand
    alone for a single other word, as in "buy gold", "sell gold". `moved`: both have the same words in another order,
    but for one or two, or one of these in the place of another: 你能告诉我我的名字吗, 你能告诉我你的名字吗
    (can you tell me my, your, name).
    `counted` are words that a number stands before, such as units, in either question.
    """

    added: Set[str]
    removed: Set[str]
    substituted: Set[str]
    moved: bool
    counted: Set[str]


class TextComparison(NamedTuple):
    """The result for a question.

    `place` is that of the question that vouches, or None, and `veto` is the name of what forbids every one; `vetoes`
    are those of each question, "" for none. `features` are those of FEATURE_NAMES, none where there is a `veto`:
    whether a single word was replaced by one that none of the questions has; whether such words were inserted; o and u,
    which are the share of words in common with the question that vouches, and of words that none of the questions has,
    both 0 at a usual value; and o², u².
    """

    place: int | None
    veto: str
    features: tuple[float, ...]
    vetoes: tuple[str, ...] = ()


def compare(asked: Text, questions: Sequence[Text]) -> TextComparison:
    """Compare `asked` with `questions` that have one answer, the nearest first; there is at least one."""
    vetoes = [pair_veto(asked, cached) for cached in questions]
    words = {place: frozenset(questions[place].words) for place, veto in enumerate(vetoes) if not veto}
    if not words:
        return _forbidden(vetoes, vetoes[0])
    ours = frozenset(asked.words)
    replaced = inserted = False
    chosen = next((place for place in words if questions[place].words == asked.words), None)
    if chosen is None:
        copies = {place: found for place in words if (found := difference(asked.words, questions[place].words))}
        for found in copies.values():
            if found.moved:
                return _forbidden(vetoes, "order")
            # Other questions may say a number or a negation of something else: for these only near-copies are asked.
            having = {
                word: [word in words[place] for place in (words if _kind({word}, found) == "words" else copies)]
                for word in found.added | found.removed
            }
            strange = {word for word in found.added if not any(having[word])}
            missing = {word for word in found.removed - ours if all(having[word])}
            if missing or (strange and len(words) < MIN_QUESTIONS) or _kind(strange, found) != "words":
                return _forbidden(vetoes, _kind(strange | missing, found))
            replaced |= not strange.isdisjoint(found.substituted)
            inserted |= not strange <= found.substituted
        chosen = next(iter(copies or words))
    theirs = words[chosen]
    overlap = 3.0 * (len(ours & theirs) / max(1, len(ours | theirs)) - 0.4)
    novelty = 3.0 * (len(ours.difference(*words.values())) / max(1, len(ours)) - 0.2)
    features = (float(replaced), float(inserted), overlap, novelty, overlap * overlap, novelty * novelty)
    return TextComparison(chosen, "", features, tuple(vetoes))


def _forbidden(vetoes: Sequence[str], veto: str) -> TextComparison:
    return TextComparison(None, veto, (), tuple(each or veto for each in vetoes))


def pair_veto(asked: Text, cached: Text) -> str:
    """The name of what forbids that two questions share an answer, whatever others with it say; "" if nothing does."""
    if asked.words == cached.words and asked.verbatim == cached.verbatim:
        return "" if asked.words or asked.written == cached.written else "verbatim"
    if max(len(asked.words), len(cached.words)) > _LONGEST:
        return "length"
    if asked.verbatim != cached.verbatim:
        ours, theirs = set(asked.verbatim), set(cached.verbatim)
        folded = {part.casefold() for part in ours - theirs} & {part.casefold() for part in theirs - ours}
        are_both_said = are_said(ours - theirs, cached.written) and are_said(theirs - ours, asked.written)
        if ours == theirs or folded or not are_both_said:
            return "verbatim"
    if min(len(asked.words), len(cached.words)) <= _SHORT and set(asked.words).isdisjoint(cached.words):
        return "words"
    if difference(asked.words, cached.words) is None:
        one, other = language_of(asked.written), language_of(cached.written)
        if one and other and one != other:
            return "language"
    return ""


def _kind(words: Set[str], found: Difference) -> str:
    """The name of a veto for words that differ."""
    if any(is_number(word) or word in found.counted or word in _OPERATORS for word in words):
        return "numbers"
    return "words" if words.isdisjoint(NEGATIONS) else "negation"


@functools.lru_cache(_KEPT)
def difference(asked: tuple[str, ...], cached: tuple[str, ...]) -> Difference | None:
    """What `asked` has that `cached` has not, and the other way round; None if they are not near-copies."""
    added, removed = list[str](), list(cached)
    for word in asked:  # for a dozen words five times as fast as the differences of two Counters
        if word in removed:
            removed.remove(word)
        else:
            added.append(word)
    new, gone, size = len(added), len(removed), len(asked) + len(cached)
    if min(new, gone) > MAX_WORDS[0] or max(new, gone) > MAX_WORDS[1] or size - new - gone < MIN_SHARED * size:
        return None
    one, other = sorted((asked, cached))  # the matcher breaks ties by the order of its arguments
    spans = [span for span in SequenceMatcher(None, one, other, autojunk=False).get_opcodes() if span[0] != "equal"]
    common = set(asked).intersection(cached)
    is_swapped = new + gone <= _FILLERS and _is_swapped(
        *(tuple(word for word in each if word in common) for each in (one, other))
    )
    if len(spans) > MAX_SPANS and (new or gone) and not is_swapped:
        return None
    substituted: set[str] = set()
    differing = {*added, *removed}
    for _, start, end, other_start, other_end in spans:
        left, right = differing.intersection(one[start:end]), differing.intersection(other[other_start:other_end])
        if len(left) == len(right) == 1:
            substituted |= left | right
    is_reordered = set(asked) == set(cached) and asked != cached and (not differing or bool(substituted))
    counted = {word for words in (asked, cached) for before, word in pairwise(words) if is_number(before)}
    return Difference(frozenset(added), frozenset(removed), substituted, is_swapped or is_reordered, counted)


def _is_swapped(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether all is in the same order, but that a few words changed places around others: from A to B, from B to A."""
    differing = [place for place, words in enumerate(zip(one, other, strict=False)) if words[0] != words[1]]
    if len(one) != len(other) or not differing:
        return False
    left, right = one[differing[0] : differing[-1] + 1], other[differing[0] : differing[-1] + 1]
    return any(
        left[:first] == right[-first:] and left[-last:] == right[:last] and left[first:-last] == right[last:-first]
        for first in range(1, _MOST_SWAPPED + 1)
        for last in range(1, _MOST_SWAPPED + 1)
        if first + last < len(left)
    )


def is_number(word: str) -> bool:
    first = word[0]
    return first in _CHINESE_NUMERALS or (first.isnumeric() and not first.isalpha())
