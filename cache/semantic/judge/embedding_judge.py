"""The default judge: the embedding model, and a few coefficients fitted to labelled answers."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from cache.semantic.judge.answer import MAX_CHARACTERS, Answer, equal, facts_of
from cache.semantic.judge.comparison import Embedding, Read, compared
from cache.semantic.judge.fitted import COEFFICIENTS, DIFFERENT_BELOW, ERROR, INTERCEPT, SAME_ABOVE
from cache.semantic.judge.judge import Embedder, Verdict

_WEIGHTS = np.array(COEFFICIENTS)
# A question is embedded from its beginning only.
_QUESTION_CHARACTERS = 2000


class EmbeddingJudge:
    """Weighs the similarity of two answers against their contradictions.

    Equal answers are SAME. Otherwise both are embedded and read (numbers, dates, negation, polarity, names, code, yes
    and no, and the edits of a near copy), and a logistic model of these few features gives the log odds that they say
    the same: SAME far above zero, DIFFERENT far below, UNSURE between. Answers of more than MAX_CHARACTERS are UNSURE
    unless they are equal.

    Reading and comparing run in a thread, so that no event loop waits. Use it from one event loop.

    Args:
        kept: how many read and embedded answers are cached, about 10 KB each.
    """

    def __init__(self, embedder: Embedder, kept: int = 1024) -> None:
        self.error = ERROR
        self.doubts = True
        self.failures = 0
        self._embedder = embedder
        self._kept = kept
        self._read: OrderedDict[str, Read] = OrderedDict()

    async def compare(self, question: str, fresh: str, cached: Sequence[str]) -> list[Verdict]:
        """One verdict for each of `cached`. Raises what the embedder raises."""
        verdicts = {text: Verdict.SAME if equal(fresh, text) else Verdict.UNSURE for text in cached}
        read_whole = [text for text, verdict in verdicts.items() if verdict is Verdict.UNSURE and _is_readable(text)]
        if read_whole and _is_readable(fresh):
            asked = question[:_QUESTION_CHARACTERS]
            vector = await self._embedder.embed(asked)
            ours = await self._reading(fresh)
            theirs = [await self._reading(text) for text in read_whole]
            odds = await asyncio.to_thread(_log_odds, asked, vector, ours, theirs)
            verdicts |= {text: verdict_of(odd) for text, odd in zip(read_whole, odds, strict=True)}
        return [verdicts[text] for text in cached]

    async def _reading(self, text: str) -> Read:
        found = self._read.get(text)
        if found is None:
            answer = await asyncio.to_thread(Answer.of, text)
            found = Read(answer, await self.embedded(answer.passages))
            self._read[text] = found
            while len(self._read) > self._kept:
                self._read.popitem(last=False)
        else:
            self._read.move_to_end(text)
        return found

    async def embedded(self, passages: tuple[str, ...]) -> Embedding:
        """The direction of the mean of the passages' vectors."""
        vectors = await asyncio.gather(*map(self._embedder.embed, passages))
        mean = np.mean(vectors, axis=0, dtype=np.float32)
        return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-6), dtype=np.float32)


def verdict_of(log_odds: float) -> Verdict:
    """The verdict for the log odds of two equal answers."""
    if log_odds > SAME_ABOVE:
        return Verdict.SAME
    return Verdict.DIFFERENT if log_odds < DIFFERENT_BELOW else Verdict.UNSURE


def _log_odds(question: str, vector: Embedding, ours: Read, theirs: Sequence[Read]) -> list[float]:
    asked = facts_of(question)
    return [INTERCEPT + float(_WEIGHTS @ compared(vector, asked, ours, other)) for other in theirs]


def _is_readable(text: str) -> bool:
    return len(text.strip()) > 0 and len(text) <= MAX_CHARACTERS
