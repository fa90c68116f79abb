"""Features for and against the equality of two answers, numbers between about -1 and 3."""

import math
from collections import Counter
from collections.abc import Set
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.semantic.judge.answer import FUNCTION_WORDS, Answer, Sentence

Embedding = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]

# The features, with the sign of each coefficient: a fit must not turn evidence for equality into evidence against it,
# on any data.
SIGNS: dict[str, int] = {
    "cosine": 1,
    "shared words": 1,
    "shared facts": 1,
    "nearer the question": -1,
    "other facts": -1,
    "other facts in a sentence": -1,
    "a copy but for facts": -1,
    "other polarity": -1,
    "other polarity of a sentence": -1,
    "other negators": -1,
    "a copy but for negators": -1,
    "other negation of a sentence": -1,
    "yes and no": -1,
    "yes and not": -1,
    "other names": -1,
    "other code": -1,
    "other labels": -1,
    "a copy with other words": -1,
    "a copy with other little words": -1,
    "a copy with moved words": -1,
}
FEATURES = tuple(SIGNS)

# Of the content words of both; sentences that share less are about other things, and their negations do not count.
_ALIGNED = 0.3
# Of the wording. If so much is literally equal, the rest decides.
_COPY = 0.8
# Of the words in any order. If all are equal, their order decides.
_SAME_WORDS = 0.97
# Pairs of equal words. Repetitive texts have so many that finding the edits would take seconds.
_MAX_MATCHES = 30_000


class Read(NamedTuple):
    """An answer with the embedding of its text, float32 [dimensions], length 1."""

    answer: Answer
    embedding: Embedding


class _Edits(NamedTuple):
    """The edits between two wordings; if they take too long to find, as if all words had changed.

    `shared` is the share of equal words, 0 to 1. The others are set only for near copies: whether content words, and
    function words, were replaced, and whether one of either was moved.
    """

    shared: float
    words: bool
    little_words: bool
    moved: bool


def compared(question: Embedding, asked: Set[str], fresh: Read, cached: Read) -> Vector:
    """float64 [len(FEATURES)].

    `question` is the embedding of what `fresh` answers, float32 [dimensions], and `asked` its facts; `cached` may be
    the answer to another question.
    """
    ours, theirs = fresh.answer, cached.answer
    pairs = _aligned(ours, theirs)
    edits = _edits(ours, theirs)
    facts = len(ours.facts - theirs.facts), len(theirs.facts - ours.facts)
    found = {
        "cosine": float(fresh.embedding @ cached.embedding),
        "shared words": len(ours.contents & theirs.contents) / max(1, min(len(ours.contents), len(theirs.contents))),
        "shared facts": math.log1p(len((ours.facts & theirs.facts) - asked)),
        "nearer the question": max(0.0, float(question @ (fresh.embedding - cached.embedding))),
        "other facts": math.log1p(min(facts)),
        "other facts in a sentence": max((s for a, b, s in pairs if _both_more(a.facts, b.facts)), default=0.0),
        "a copy but for facts": edits.shared * (max(facts) > 0),
        "other polarity": float(_opposed(ours, theirs)),
        "other polarity of a sentence": max((s for a, b, s in pairs if _opposed(a, b)), default=0.0),
        "other negators": math.log1p(abs(ours.negators - theirs.negators)),
        "a copy but for negators": edits.shared * (ours.negators != theirs.negators),
        "other negation of a sentence": max((s for a, b, s in pairs if (a.negators + b.negators) % 2), default=0.0),
        "yes and no": float(ours.lead * theirs.lead < 0),
        "yes and not": float(_lead_against(ours, theirs) or _lead_against(theirs, ours)),
        "other names": float(_both_more(ours.names, theirs.names)),
        "other code": float(_both_more(ours.code, theirs.code)),
        "other labels": float(_both_more(ours.labels, theirs.labels)),
        "a copy with other words": float(edits.words),
        "a copy with other little words": float(edits.little_words),
        "a copy with moved words": float(edits.moved),
    }
    return np.array([found[name] for name in FEATURES])


def _aligned(ours: Answer, theirs: Answer) -> list[tuple[Sentence, Sentence, float]]:
    """Each sentence with its best match in the other answer and the share of words in common, if it has a match."""
    pairs: dict[tuple[int, int], float] = {}
    best: dict[int, tuple[float, int]] = {}
    for row, sentence in enumerate(ours.sentences):
        found = (0.0, 0)
        for column, other in enumerate(theirs.sentences):
            together = len(sentence.contents | other.contents)
            share = len(sentence.contents & other.contents) / together if together else 0.0
            found = max(found, (share, column))
            best[column] = max(best.get(column, (0.0, 0)), (share, row))
        pairs[row, found[1]] = found[0]
    pairs |= {(row, column): share for column, (share, row) in best.items()}
    return [(ours.sentences[a], theirs.sentences[b], share) for (a, b), share in pairs.items() if share > _ALIGNED]


def _edits(ours: Answer, theirs: Answer) -> _Edits:
    counts, others = Counter(ours.sequence), Counter(theirs.sequence)
    if sum(count * others[word] for word, count in counts.items()) > _MAX_MATCHES:
        return _Edits(1.0, True, True, True)
    matcher = SequenceMatcher(None, ours.sequence, theirs.sequence, autojunk=False)
    shared = matcher.ratio()
    if shared <= _COPY and matcher.quick_ratio() <= _SAME_WORDS:
        return _Edits(shared, False, False, False)
    gone: set[str] = set()
    come: set[str] = set()
    words = little_words = False
    for what, a, b, c, d in matcher.get_opcodes():
        if what == "equal":
            continue
        lost, found = ours.sequence[a:b], theirs.sequence[c:d]
        gone.update(lost)
        come.update(found)
        words = words or not (ours.contents.isdisjoint(lost) or theirs.contents.isdisjoint(found))
        little_words = little_words or FUNCTION_WORDS.intersection(lost) != FUNCTION_WORDS.intersection(found)
    moved = any(word in FUNCTION_WORDS or word in ours.contents or len(word) == 1 for word in gone & come)
    return _Edits(shared, words, little_words, moved)


def _both_more(ours: Set[str], theirs: Set[str]) -> bool:
    """Whether each has an element that the other lacks; one of them alone may have more."""
    return not (ours <= theirs or theirs <= ours)


def _opposed(one: Answer | Sentence, other: Answer | Sentence) -> bool:
    return bool(one.left & other.right or one.right & other.left)


def _lead_against(one: Answer, other: Answer) -> bool:
    """A leading yes against an answer with negators but no lead, or a leading no against one with neither."""
    if other.lead:
        return False
    return (one.lead > 0 and other.negators > 0) or (one.lead < 0 and other.negators == 0)
