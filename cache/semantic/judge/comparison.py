"""Evidence for and against the equality of two answers: contradictions that decide, and a few features."""

import math
from collections.abc import Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.semantic.judge.answer import Answer

Embedding = npt.NDArray[np.float32]
Features = npt.NDArray[np.float64]

# The features, with the sign of each coefficient: a fit must not turn evidence for equality into evidence against it,
# on any data. A copy that says something else was found out before, so likeness of words counts against both.
SIGNS: dict[str, int] = {
    "cosine": 1,
    "cosine of sentences": 1,
    "shared words": 1,
    "words of the shorter": 1,
    "shared numbers": 1,
    "numbers of one": -1,
    "a copy": -1,
}
FEATURES = tuple(SIGNS)

# Two wordings with so many words in common, or so few that are not, are one text with a change, and that decides.
_COPY = 0.8
_FEW_WORDS = 4
_HALF_COPY = 0.5
# Words of more letters weigh no more.
_LONGEST = 9


class Read(NamedTuple):
    """An answer with the embeddings of its text, float32 [dimensions], and of its sentences, float32 [sentences,
    dimensions]; each of length 1."""

    answer: Answer
    embedding: Embedding
    sentences: Embedding


def contradict(ours: Answer, theirs: Answer) -> bool:
    """Whether each has a number that the other lacks, or one is a copy of the other but for a few words.

    One of them alone may have more numbers. A paraphrase differs in most of its words, so that one word proves nothing;
    in a copy it is what is meant.
    """
    if not (ours.numbers <= theirs.numbers or theirs.numbers <= ours.numbers):
        return True
    differing = len(ours.words) + len(theirs.words) - 2 * (ours.counts & theirs.counts).total()
    return ours.words != theirs.words and (differing <= _FEW_WORDS or _shared(ours, theirs) > _COPY)


def compared(asked: Answer, fresh: Read, cached: Read) -> Features:
    """float64 [len(FEATURES)].

    `asked` is the question that `fresh` answers; `cached` may be the answer to another one. Words and numbers of the
    question are in any answer to it, and prove nothing.
    """
    ours, theirs = fresh.answer, cached.answer
    our_words, their_words = ours.counts.keys() - asked.counts.keys(), theirs.counts.keys() - asked.counts.keys()
    common = _weight(our_words & their_words)
    alike = fresh.sentences @ cached.sentences.T
    best = np.concatenate([alike.max(axis=0), alike.max(axis=1)])
    found = {
        "cosine": float(fresh.embedding @ cached.embedding),
        "cosine of sentences": float(best.mean()),
        "shared words": common / max(1, _weight(our_words | their_words)),
        "words of the shorter": common / max(1, min(_weight(our_words), _weight(their_words))),
        "shared numbers": math.log1p(len((ours.numbers & theirs.numbers) - asked.numbers)),
        "numbers of one": math.log1p(len(ours.numbers ^ theirs.numbers)),
        "a copy": max(0.0, _shared(ours, theirs) - _HALF_COPY),
    }
    return np.array([found[name] for name in FEATURES])


def _weight(words: Set[str]) -> int:
    """Longer words say more, in most languages."""
    return sum(min(len(word), _LONGEST) - 1 for word in words)


def _shared(ours: Answer, theirs: Answer) -> float:
    """The share of words in common, in any order (Dice)."""
    return 2 * (ours.counts & theirs.counts).total() / max(1, len(ours.words) + len(theirs.words))
