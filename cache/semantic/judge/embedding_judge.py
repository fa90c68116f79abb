"""The default judge: the embedding model, and a few coefficients fitted to labelled answers."""

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.semantic.judge import fitted
from cache.semantic.judge.answer import MAX_CHARACTERS, Answer, equal
from cache.semantic.judge.judge import MAX_SCORE

# Two wordings with so many words in common, or so few that are not, are one text with a change, and that decides.
_COPY = 0.8
_FEW_WORDS = 4
_HALF_COPY = 0.5
# Words of more letters weigh no more.
_LONGEST = 9


class Read(NamedTuple):
    """An answer with the embedding of its text, float32 [dimensions], of length 1."""

    answer: Answer
    embedding: npt.NDArray[np.float32]


class EmbeddingJudge:
    """Weighs the similarity of two answers and of their words.

    Equal answers have the highest score, and the lowest one those with other numbers, copies with a change, and
    answers of more than MAX_CHARACTERS that are not equal. Otherwise a logistic model of a few features gives the log
    odds that they say the same.

    Reading and comparing run in a thread, so that no event loop waits. Use it from one event loop.

    Args:
        embed: computes the unit vector of a text, float32 [dimensions].
        kept: how many read and embedded answers are cached, 2 KB and some 20 bytes for each of their characters.
    """

    def __init__(self, embed: Callable[[str], Awaitable[npt.NDArray[np.float32]]], kept: int = 512) -> None:
        self.same_above = fitted.SAME_ABOVE
        self.failures = 0
        self._embed = embed
        self._kept = kept
        # The least recently used first.
        self._read: dict[str, Read] = {}

    async def compare(self, model: str, question: str, fresh: str, cached: Sequence[str]) -> list[float | None]:
        """One score for each of `cached`, never None. Raises what `embed` raises."""
        scores = {text: MAX_SCORE if equal(fresh, text) else -MAX_SCORE for text in cached}
        read_whole = [text for text, score in scores.items() if score < 0 and _is_readable(text)]
        if read_whole and _is_readable(fresh):
            ours = await self.read(fresh)
            theirs = [await self.read(text) for text in read_whole]
            odds = await asyncio.to_thread(log_odds, question[:MAX_CHARACTERS], ours, theirs)
            scores |= dict(zip(read_whole, odds, strict=True))
        return [scores[text] for text in cached]

    async def read(self, text: str) -> Read:
        """An answer, with the direction of the mean of its passages' vectors."""
        found = self._read.pop(text, None)
        if found is None:
            answer = await asyncio.to_thread(Answer.of, text)
            mean = np.mean(await asyncio.gather(*map(self._embed, answer.passages)), axis=0)
            found = Read(answer, mean / max(float(np.linalg.norm(mean)), 1e-6))
        self._read[text] = found
        if len(self._read) > self._kept:
            del self._read[next(iter(self._read))]
        return found


def coefficients_digest() -> str:
    """BLAKE2b-64, hex, of all that was fitted: errors that were measured hold for a judge with these alone."""
    coefficients = tuple(fitted.COEFFICIENTS.values())
    numbers = [fitted.INTERCEPT, coefficients, fitted.SAME_ABOVE, fitted.DISAGREEMENT, fitted.DISAGREEMENT_OF_SCORE]
    return hashlib.blake2b(repr(numbers).encode(), digest_size=8).hexdigest()


def log_odds(question: str, ours: Read, theirs: Sequence[Read]) -> list[float]:
    """The scores of all of `theirs`, in [-MAX_SCORE, MAX_SCORE]."""
    asked, scores = Answer.of(question), []
    for other in theirs:
        odds = -MAX_SCORE
        if not contradict(ours.answer, other.answer):
            values = compared(asked, ours, other)
            odds = fitted.INTERCEPT + sum(fitted.COEFFICIENTS[name] * value for name, value in values.items())
        scores.append(max(-MAX_SCORE, min(MAX_SCORE, odds)))
    return scores


def _is_readable(text: str) -> bool:
    return len(text.strip()) > 0 and len(text) <= MAX_CHARACTERS


def contradict(ours: Answer, theirs: Answer) -> bool:
    """Whether each has a number that the other lacks, or one is a copy of the other but for a few words.

    One of them alone may have more numbers. A paraphrase differs in most of its words, so that one word proves nothing;
    in a copy it is what is meant.
    """
    if not (ours.numbers <= theirs.numbers or theirs.numbers <= ours.numbers):
        return True
    differing = len(ours.words) + len(theirs.words) - 2 * (ours.counts & theirs.counts).total()
    return ours.words != theirs.words and (differing <= _FEW_WORDS or _shared(ours, theirs) > _COPY)


def compared(asked: Answer, fresh: Read, cached: Read) -> dict[str, float]:
    """Evidence for and against the equality of two answers, by the names of the coefficients.

    `asked` is the question that `fresh` answers; `cached` may be the answer to another one. Words and numbers of the
    question are in any answer to it, and prove nothing. "shared words" is the share of the words of the shorter answer,
    by weight.
    """
    ours, theirs = fresh.answer, cached.answer
    our_words, their_words = ours.counts.keys() - asked.counts.keys(), theirs.counts.keys() - asked.counts.keys()
    common = _weight(our_words & their_words)
    return {
        "cosine": float(fresh.embedding @ cached.embedding),
        "shared words": common / max(1, min(_weight(our_words), _weight(their_words))),
        "shared numbers": math.log1p(len((ours.numbers & theirs.numbers) - asked.numbers)),
        "difference in negations": math.log1p(abs(ours.negations - theirs.negations)),
        "a copy": max(0.0, _shared(ours, theirs) - _HALF_COPY),
    }


def _weight(words: Set[str]) -> int:
    """Longer words say more, in most languages."""
    return sum(min(len(word), _LONGEST) - 1 for word in words)


def _shared(ours: Answer, theirs: Answer) -> float:
    """The share of words in common, in any order (Dice)."""
    return 2 * (ours.counts & theirs.counts).total() / max(1, len(ours.words) + len(theirs.words))
