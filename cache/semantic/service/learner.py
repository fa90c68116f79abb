"""What the semantic cache learns from fresh answers: labels for the policy, and answers for the next who asks."""

import asyncio
import logging
import time
from collections.abc import Sequence

from cache.errors import CacheError
from cache.key import namespace_of
from cache.semantic.embedding.embedder import Embedder
from cache.semantic.judge.judge import Judge, Verdict
from cache.semantic.messages import Answered
from cache.semantic.policy.label import Label
from cache.semantic.service.answers import Answers, plain_answer
from cache.semantic.service.figures import Figures
from cache.semantic.service.inquiries import Inquiry
from cache.semantic.service.labels import Labels
from cache.semantic.service.log import RecordLog
from cache.semantic.service.neighbours import Neighbour, Neighbours, first_allowed
from cache.semantic.service.records import Record

log = logging.getLogger(__name__)

# Different answers with which a fresh one is compared, and how near their questions must be.
_MOST_COMPARED = 4
_LEAST_SIMILARITY = 0.5
_MOST_WAITING = 1000
_DISCARDED_AT_ONCE = 500


class Learner:
    """Judges fresh answers one after the other, behind the requests that brought them.

    `shared` is where other processes hear of it; without one this process learns alone.
    """

    def __init__(
        self,
        embedder: Embedder,
        neighbours: Neighbours,
        answers: Answers,
        judge: Judge,
        labels: Labels,
        shared: RecordLog | None,
        figures: Figures,
        capacity: int,
    ) -> None:
        self._embedder = embedder
        self._neighbours = neighbours
        self._answers = answers
        self._judge = judge
        self._labels = labels
        self._log = shared
        self._figures = figures
        self._capacity = capacity
        self._waiting: asyncio.Queue[tuple[Answered, Inquiry | None]] = asyncio.Queue(_MOST_WAITING)

    async def hear(self, note: Answered, inquiry: Inquiry | None) -> None:
        if self._waiting.full():  # the oldest is the one that others have learned from meanwhile
            self._waiting.get_nowait()
            self._figures.count("unjudged")
        self._waiting.put_nowait((note, inquiry))

    async def work(self) -> None:
        """Judge what was heard; runs for as long as the cache does."""
        while True:
            note, inquiry = await self._waiting.get()
            try:
                await self._learn(note, inquiry)
            except CacheError as error:
                self._figures.count("unjudged")
                log.debug("a fresh answer was not judged: %s", error)
            finally:
                self._waiting.task_done()

    async def idle(self) -> None:
        """Wait until everything that was heard is judged."""
        await self._waiting.join()

    async def teach(self, label: Label) -> None:
        """Let the policy learn, here and in all other processes."""
        self._figures.count(f"labels_from_{label.source}")
        if label.source != "miss":
            self._labels.settle(label)
        if self._log is None or not self._log.publish(self._labels.encode(label), lambda: self._labels.learn(label)):
            self._labels.learn(label)

    async def forget(self, entry: str, wrong: bool = False) -> bool:
        """Remove an entry everywhere; False if there was none. Others hear as well if it is because it was `wrong`."""
        self._answers.forget(entry)
        record = await self._neighbours.remove(entry)
        if self._log is not None:
            if wrong:
                self._log.wrong(entry)
            self._log.remove(entry)
        return record is not None

    async def discard(self, entries: Sequence[str]) -> None:
        """Remove entries that other processes remove by themselves."""
        for start in range(0, len(entries), _DISCARDED_AT_ONCE):
            some = entries[start : start + _DISCARDED_AT_ONCE]
            for entry in some:
                self._answers.forget(entry)
            await self._neighbours.remove_all(some)
            if self._log is not None:
                self._log.discard(some)

    async def _learn(self, note: Answered, inquiry: Inquiry | None) -> None:
        text = plain_answer(note.body)
        if text is None:
            if self._neighbours.records.get(note.entry) is not None:  # it was of an older answer
                await self.forget(note.entry)
            return
        namespace = namespace_of(note.entry)
        vector = await self._embedder.embed(note.text) if inquiry is None else inquiry.vector
        near = [n for n in await self._neighbours.near(note.partition, vector) if n.record.entry != note.entry]
        verdicts = await self._compare(note.text, text, self._worth_comparing(near, inquiry))
        if inquiry is not None and inquiry.evidence is not None:
            verdict = verdicts.get(inquiry.entry, Verdict.UNSURE)
            if verdict is not Verdict.UNSURE or (self._judge.doubts and inquiry.entry in verdicts):
                await self.teach(inquiry.label(verdict is Verdict.SAME))
        same = [
            kept
            for kept in map(self._neighbours.records.get, verdicts)
            if kept and verdicts[kept.entry] is Verdict.SAME
        ]
        for record in same:
            is_stranger = self._neighbours.is_stranger(record, namespace)
            # The same words may answer another question: three who hear "Yes." have not been asked the same.
            if is_stranger and first_allowed(note.text, [Neighbour(record, 1.0)], [0])[0] is not None:
                self._confirm(record, namespace)
        own = [record.answer for record in same if record.namespace == namespace] or [r.answer for r in same]
        record = Record(
            note.entry, note.partition, note.text, own[0] if own else note.entry, note.model, note.generation,
            note.created, note.expires,
        )  # fmt: skip
        if record.expires > time.time():
            self._answers.hear(record.entry, text)
            await self._neighbours.put(record, vector)
            if self._log is not None:
                self._log.save(record, vector)
            await self._make_room()

    async def _compare(self, question: str, fresh: str, near: Sequence[Neighbour]) -> dict[str, Verdict]:
        texts: dict[str, str] = {}
        for neighbour in near:
            text = await self._answers.of(neighbour.record.entry)
            if text is None:
                await self.forget(neighbour.record.entry)
            else:
                texts[neighbour.record.entry] = text
        verdicts = await self._judge.compare(question, fresh, list(texts.values()))
        for verdict in verdicts:
            self._figures.count(f"judged_{verdict.name.lower()}")
        return dict(zip(texts, verdicts, strict=True))

    def _worth_comparing(self, near: Sequence[Neighbour], inquiry: Inquiry | None) -> list[Neighbour]:
        """What was or would have been served, and the nearest of each other answer."""
        chosen: dict[str, Neighbour] = {}
        served = self._neighbours.records.get(inquiry.entry) if inquiry is not None else None
        if served is not None:
            chosen[served.answer] = Neighbour(served, 1.0)
        for neighbour in near:
            if neighbour.similarity >= _LEAST_SIMILARITY:
                chosen.setdefault(neighbour.record.answer, neighbour)
        return list(chosen.values())[:_MOST_COMPARED]

    def _confirm(self, record: Record, namespace: str) -> None:
        if self._neighbours.records.confirm(record.entry, record.created, namespace) and self._log is not None:
            self._log.confirm(record, namespace)

    async def _make_room(self) -> None:
        while len(self._neighbours.records) > self._capacity:
            oldest = self._neighbours.records.oldest()
            assert oldest is not None  # noqa: S101  # there are more than none
            await self.forget(oldest)
            self._figures.count("evicted")
