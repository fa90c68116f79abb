"""The default judge: the embedding model, and a few coefficients fitted to labelled answers."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from cache.semantic.judge import fitted
from cache.semantic.judge.answer import MAX_CHARACTERS, Answer, equal
from cache.semantic.judge.comparison import Embedding, Read, compared, contradict
from cache.semantic.judge.fitted import COEFFICIENTS, INTERCEPT, SAME_ABOVE
from cache.semantic.judge.judge import MAX_SCORE, Embedder

_WEIGHTS = np.array(COEFFICIENTS)


class EmbeddingJudge:
    """Weighs the similarity of two answers, of their sentences and of their words.

    Equal answers have the highest score, and the lowest one those with other numbers, copies with a change, and
    answers of more than MAX_CHARACTERS that are not equal. Otherwise a logistic model of a few features gives the log
    odds that they say the same.

    Reading and comparing run in a thread, so that no event loop waits. Use it from one event loop.

    Args:
        kept: how many read and embedded answers are cached, some 20 KB each.
    """

    def __init__(self, embedder: Embedder, kept: int = 512) -> None:
        self.same_above = SAME_ABOVE
        self.failures = 0
        self._embedder = embedder
        self._kept = kept
        self._read: OrderedDict[str, Read] = OrderedDict()

    async def compare(self, model: str, question: str, fresh: str, cached: Sequence[str]) -> list[float | None]:
        """One score for each of `cached`, never None. Raises what the embedder raises."""
        scores = {text: MAX_SCORE if equal(fresh, text) else -MAX_SCORE for text in cached}
        read_whole = [text for text, score in scores.items() if score < 0 and _is_readable(text)]
        if read_whole and _is_readable(fresh):
            ours = await self._reading(fresh)
            theirs = [await self._reading(text) for text in read_whole]
            odds = await asyncio.to_thread(log_odds, question[:MAX_CHARACTERS], ours, theirs)
            scores |= dict(zip(read_whole, odds, strict=True))
        return [scores[text] for text in cached]

    async def _reading(self, text: str) -> Read:
        found = self._read.get(text)
        if found is None:
            answer = await asyncio.to_thread(Answer.of, text)
            found = self._read[text] = await self.embedded(answer)
            while len(self._read) > self._kept:
                self._read.popitem(last=False)
        else:
            self._read.move_to_end(text)
        return found

    async def embedded(self, answer: Answer) -> Read:
        """The answer with the direction of the mean of its passages' vectors, and the vectors of its sentences."""
        vectors = await asyncio.gather(*map(self._embedder.embed, (*answer.passages, *answer.sentences)))
        mean = np.mean(vectors[: len(answer.passages)], axis=0, dtype=np.float32)
        embedding: Embedding = np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-6), dtype=np.float32)
        sentences = vectors[len(answer.passages) :] or [embedding]
        return Read(answer, embedding, np.stack(sentences))


def coefficients_digest() -> str:
    """BLAKE2b-64, hex, of all that was fitted: errors that were measured hold for a judge with these alone."""
    names = ("INTERCEPT", "COEFFICIENTS", "SAME_ABOVE", "DISAGREEMENT", "DISAGREEMENT_OF_SCORE")
    return hashlib.blake2b(repr([getattr(fitted, name) for name in names]).encode(), digest_size=8).hexdigest()


def log_odds(question: str, ours: Read, theirs: Sequence[Read]) -> list[float]:
    """The scores of all of `theirs`, in [-MAX_SCORE, MAX_SCORE]."""
    asked = Answer.of(question)
    return [
        -MAX_SCORE
        if contradict(ours.answer, other.answer)
        else float(np.clip(INTERCEPT + _WEIGHTS @ compared(asked, ours, other), -MAX_SCORE, MAX_SCORE))
        for other in theirs
    ]


def _is_readable(text: str) -> bool:
    return len(text.strip()) > 0 and len(text) <= MAX_CHARACTERS
