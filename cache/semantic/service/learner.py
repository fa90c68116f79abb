"""Learns from fresh answers: labels for the policy, and records that later lookups find."""

import asyncio
import contextlib
import functools
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from cache.entries.key import namespace_of
from cache.errors import CacheError, StoreUnavailable
from cache.semantic.embedding.embedder import Embedder
from cache.semantic.embedding.encoder import Vector
from cache.semantic.judge.answer import class_of
from cache.semantic.judge.error_rates import JudgedPair
from cache.semantic.judge.judge import Judge
from cache.semantic.judge.repeatability import MAX_DISAGREEMENT, disagreement_of, is_repeatable
from cache.semantic.messages import AnswerStored
from cache.semantic.policy.policy import COMPARED_ANSWERS, LEAST_COMPARED, EqualAnswers, JudgeError, Label, Source
from cache.semantic.policy.posterior import sigmoid
from cache.semantic.service.answers import Answers, KnownAnswer, plain_answer
from cache.semantic.service.labels import Labels
from cache.semantic.service.lookups import Query, RunningLookups, ServiceMetrics
from cache.semantic.service.neighbours import AT_ONCE, Neighbours, compare_texts
from cache.semantic.service.record_log import RecordLog
from cache.semantic.service.records import Record

log = logging.getLogger(__name__)

_MAX_WAITING = 1000
_JUDGED_AT_ONCE = 4
_CHECKED_AT_ONCE = 1000
# A record should be stored with its group of equal answers. So an idle judge is waited for, at most so many seconds,
# while no more than so many answers wait to be stored.
_PATIENCE = 0.5
_MAX_PATIENT = 100
# A fresh answer is also compared with one of the last ones to questions that have nothing to do with its own.
_RECENT = 64
_UNRELATED_BELOW = 0.3
# Comparisons of a judge with a cost, to begin with.
_FIRST = 500.0


@dataclass(slots=True, eq=False)
class Comparison:
    """A fresh answer, `text`, and the records of `others` whose answers it is compared with.

    First the one that was or would be served, then the nearest.

    `record` and its `vector` are those of the fresh answer; `record.answer` is its own entry until the judge has found
    an equal answer. `query` is the lookup that it belongs to. `earlier` is an older answer to the very same question,
    and `unrelated` one to a question that has nothing to do with it: of these it is known whether they say the same.
    """

    record: Record
    vector: Vector
    text: str
    others: Sequence[Record]
    query: Query | None
    earlier: str | None
    unrelated: str | None


class Learner:
    """Processes fresh answers one after the other, in the background, and has them judged.

    hear → embed → neighbours → compare → keep

    An answer that a slow judge has not compared yet is stored as one without equals; its group and its label follow. If
    too many wait, the newest are not stored, or not compared.

    `shared` publishes to other processes; without one this process learns alone. `judge_share` limits the judge's
    comparisons, except audits: below 1 it is their number for each fresh answer, with 500 more to begin with. At most
    `capacity` records are kept.
    """

    def __init__(
        self,
        embedder: Embedder,
        neighbours: Neighbours,
        answers: Answers,
        judge: Judge,
        labels: Labels,
        capacity: int,
        judge_share: float = 1.0,
        shared: RecordLog | None = None,
    ) -> None:
        self.embedder = embedder
        self.neighbours = neighbours
        self.labels = labels
        self.figures = ServiceMetrics()
        self.lookups = RunningLookups()
        self._answers = answers
        self._judge = judge
        self._judge_share = judge_share
        self._compared_at_most = 1 if judge_share < 1.0 else COMPARED_ANSWERS
        self._most_comparisons = self._comparisons_left = _FIRST if judge_share < 1.0 else math.inf
        self._judge_slots = asyncio.Semaphore(_JUDGED_AT_ONCE)
        self._log = shared
        self._capacity = capacity
        self._recent: deque[Comparison] = deque(maxlen=_RECENT)
        self._heard: asyncio.Queue[tuple[AnswerStored, Query | None]] = asyncio.Queue(_MAX_WAITING)
        self._judging: set[asyncio.Task[None]] = set()

    def record_answer(self, note: AnswerStored, query: Query | None) -> None:
        """To be learned later; `query` is the lookup that the answer belongs to."""
        try:
            self._heard.put_nowait((note, query))
        except asyncio.QueueFull:
            self.figures.counts["not_learned"] += 1

    async def work(self) -> None:
        """Learns from recorded answers; runs while the cache does."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                note, query = await self._heard.get()
                await self.lookups.yield_to_lookups()
                try:
                    await self._learn(note, query, tasks)
                except CacheError as error:
                    self.figures.counts["not_learned"] += 1
                    log.debug("a fresh answer was not learned: %s", error)
                finally:
                    self._heard.task_done()

    async def idle(self) -> None:
        """Waits until all recorded answers are stored and judged."""
        await self._heard.join()
        if self._judging:
            await asyncio.wait(self._judging)

    def add_label(self, query: Query, same: bool, source: Source, judge: JudgeError | None = None) -> bool:
        """Let the policy learn, here and in all other processes, whether the answer that was, or would have been,
        served was right; `judge` is how often who says so errs. False if there is nothing to learn.
        """
        if query.evidence is None or query.decision is None:
            return False
        label = Label.of(query.evidence, query.decision, same, source, judge)
        self.figures.counts[f"labels_from_{source}"] += 1
        if source != "miss":
            self.labels.policy.settle(label)
        self._publish(label)
        return True

    def _publish(self, learned: Label | JudgedPair | EqualAnswers) -> None:
        learn = functools.partial(self.labels.learn, learned)
        if self._log is None or self._log.breaker.is_open:
            learn()
        else:
            self._log.announce("label", label=self.labels.encode(learned), lost=learn)

    async def forget(self, entry: str, wrong: bool = False) -> bool:
        """Remove an entry everywhere; False if there was none. `wrong`: also publishes that."""
        was_there = self.neighbours.records.get(entry) is not None
        if self._log is not None and wrong:
            self._log.announce("wrong", entry)
        await self._remove([entry], announced=True)
        return was_there

    async def discard(self, is_unwanted: Callable[[Record], bool]) -> None:
        """Remove records that other processes remove by themselves, while lookups go on, but none of a newer answer."""
        records = list(self.neighbours.records)
        for start in range(0, len(records), _CHECKED_AT_ONCE):
            unwanted = list(filter(is_unwanted, records[start : start + _CHECKED_AT_ONCE]))
            for first in range(0, len(unwanted), AT_ONCE):
                some = unwanted[first : first + AT_ONCE]
                if entries := [record.entry for record in some if not self._is_replaced(record)]:
                    await self._remove(entries, announced=False)
            await asyncio.sleep(0)

    async def _remove(self, entries: Sequence[str], announced: bool) -> None:
        for entry in entries:
            self._answers.forget(entry)
        if self._log is not None:
            self._log.remove(entries, announced)
        await self.neighbours.remove(entries)

    async def _learn(self, note: AnswerStored, query: Query | None, tasks: asyncio.TaskGroup) -> None:
        text = plain_answer(note.body)
        if text is None:
            if self.neighbours.records.get(note.entry) is not None:  # the record of an older answer
                await self.forget(note.entry)
            return
        vector = None if query is None else query.vector
        if vector is None:
            vector = await self.embedder.embed(note.text)
        others = await self._comparable(note, vector, query)
        earlier = await self._earlier(note)
        record = Record(
            note.entry,
            note.partition,
            note.text,
            f"{note.entry}@{note.created}",  # an entry outlives its answer
            note.model,
            note.generation,
            note.created,
            note.expires,
            answers=class_of(text),
            disagreement=0.0 if earlier is None else earlier.record.disagreement,
        )
        unrelated = self._unrelated(record, vector)
        comparison = Comparison(record, vector, text, others, query, earlier and earlier.text, unrelated)
        self._recent.append(comparison)
        if others or earlier or unrelated:
            await self._have_judged(comparison, tasks)
        await self._keep(comparison)

    async def _comparable(self, note: AnswerStored, vector: Vector, query: Query | None) -> list[Record]:
        near = await self.neighbours.near(note.partition, vector)
        others = [record for record, similarity in near if record.entry != note.entry and similarity >= LEAST_COMPARED]
        served = None if query is None else self.neighbours.records.get(query.entry)
        return others if served is None else [served, *others]

    async def _earlier(self, note: AnswerStored) -> KnownAnswer | None:
        """An older answer to the very same question, unless it was purged since."""
        found = self._answers.earlier(note.entry)
        if found is None and (record := self.neighbours.same_form(note.partition, note.text)) is not None:
            with contextlib.suppress(StoreUnavailable):  # it has another answer now, which is reported as well
                found = await self._answers.of(record)
        if found is None or (found.record.model, found.record.generation) != (note.model, note.generation):
            return None
        return found if found.record.created != note.created else None

    def _unrelated(self, record: Record, vector: Vector) -> str | None:
        """An answer of the same tenant to a question that has nothing to do with the record's, by chance."""
        unrelated = [
            recent.text
            for recent in self._recent
            if recent.record.namespace == record.namespace and float(recent.vector @ vector) < _UNRELATED_BELOW
        ]
        return random.choice(unrelated) if unrelated else None  # noqa: S311  # which one is no secret

    async def _have_judged(self, comparison: Comparison, tasks: asyncio.TaskGroup) -> None:
        """Returns when it is judged, or after a timeout."""
        if len(self._judging) >= _MAX_WAITING:
            self.figures.counts["unjudged"] += 1
            return
        is_quick = not self._judging and self._heard.qsize() < _MAX_PATIENT
        judging = tasks.create_task(self._judge_one(comparison))
        self._judging.add(judging)
        judging.add_done_callback(self._judging.discard)
        await asyncio.wait([judging], timeout=_PATIENCE if is_quick else 0)

    async def _keep(self, comparison: Comparison) -> None:
        record = comparison.record
        if record.expires <= time.time():
            return
        self._answers.record_answer(record, comparison.text)
        if self._log is not None:
            self._log.save(record, comparison.vector)
        await self.neighbours.put([(record, comparison.vector)])
        while len(self.neighbours.records) > self._capacity and (oldest := self.neighbours.records.oldest()):
            await self.forget(oldest)
            self.figures.counts["evicted"] += 1

    async def _judge_one(self, comparison: Comparison) -> None:
        async with self._judge_slots:
            await self.lookups.yield_to_lookups()
            try:
                await self._measure(comparison)
                await self._conclude(comparison, await self._compare(comparison))
            except CacheError as error:
                self.figures.counts["unjudged"] += 1
                log.debug("a fresh answer was not judged: %s", error)

    async def _measure(self, comparison: Comparison) -> None:
        """Have pairs judged of which the truth is known, for the judge's errors and for what answers disagree."""
        fresh, errors = comparison.record, self.labels.errors
        if (score := await self._score(comparison, comparison.unrelated)) is not None:
            self._publish(JudgedPair(fresh.model, fresh.answers, "unrelated", score))
        if (score := await self._score(comparison, comparison.earlier)) is None:
            return
        agrees = score > errors.limit(fresh.model, fresh.answers)
        self.figures.counts["agreed_with_itself" if agrees else "disagreed_with_itself"] += 1
        evidence = disagreement_of(score)
        if is_repeatable(fresh):
            self._publish(JudgedPair(fresh.model, fresh.answers, "again", score))
        elif fresh.disagreement == 0.0:
            share = sigmoid(errors.unrepeatable(fresh.model, fresh.answers) + evidence)
            self._publish(JudgedPair(fresh.model, fresh.answers, "first", score, share))
        disagreement = max(-MAX_DISAGREEMENT, min(MAX_DISAGREEMENT, fresh.disagreement + evidence))
        self._update(comparison, disagreement=disagreement)

    async def _score(self, comparison: Comparison, other: str | None) -> float | None:
        """Of a pair of which the truth is known; None if there is no other answer, or it may not be judged."""
        if other is None or not self._may_judge():
            return None
        record = comparison.record
        return (await self._judge.compare(record.model, record.text, comparison.text, [other]))[0]

    def _may_judge(self) -> bool:
        """Takes one comparison from those that are left to a judge with a cost."""
        may = self._comparisons_left >= 1.0
        self._comparisons_left -= may
        return may

    async def _compare(self, comparison: Comparison) -> dict[str, bool | None]:
        """Whether the answer of each entry is the same, None where the judge gave no verdict.

        Answers recomputed meanwhile or unreadable are left out.
        """
        fresh, query = comparison.record, comparison.query
        found = await self._known(comparison.others)
        self._comparisons_left = min(self._most_comparisons, self._comparisons_left + self._judge_share)
        # The choice does not depend on the verdict, so the verdicts are an unbiased sample.
        if found and not (query and query.is_audit) and not self._may_judge():
            self.figures.counts["unjudged"] += 1
            return {}
        texts = [text for _, text in found]
        scores = await self._judge.compare(fresh.model, fresh.text, comparison.text, texts)
        limit = self.labels.errors.limit(fresh.model, fresh.answers)
        verdicts: dict[str, bool | None] = {}
        for (record, _), score in zip(found, scores, strict=True):
            same = None if score is None else score > limit
            self.figures.counts["judged_unsure" if same is None else "judged_same" if same else "judged_different"] += 1
            if not self._is_replaced(record):
                verdicts[record.entry] = same
        return verdicts

    async def _known(self, others: Sequence[Record]) -> list[KnownAnswer]:
        """The first of each distinct answer, of those that still exist, as many as are compared."""
        chosen: dict[str, Record] = {}
        for record in others:
            kept = self.neighbours.records.get(record.entry)
            if kept is not None and kept.created == record.created:
                chosen.setdefault(self.labels.policy.name_of(kept.answer), kept)
        answers = []
        for record in list(chosen.values())[: self._compared_at_most]:
            with contextlib.suppress(StoreUnavailable):  # what it says is not known now
                answer = await self._answers.of(record)
                if answer is not None:
                    answers.append(answer)
                elif not self._is_replaced(record):
                    await self.forget(record.entry)
        return answers

    async def _conclude(self, comparison: Comparison, verdicts: dict[str, bool | None]) -> None:
        fresh, query = comparison.record, comparison.query
        if query is not None:
            if query.watched is not None:
                query.watched.judged(verdicts)
            if (same := verdicts.get(query.entry)) is not None:
                error = self.labels.errors.error(fresh.model, fresh.answers)
                self.add_label(query, same, "audit" if query.is_audit else "miss", error)
        judged = [kept for kept in map(self.neighbours.records.get, verdicts) if kept]
        equal = [kept for kept in judged if verdicts[kept.entry]]
        if equal:  # the group of one of the same tenant, if there is one
            first = min(equal, key=lambda record: record.namespace != fresh.namespace)
            self._update(comparison, answer=first.answer)
            self._join(fresh, judged, verdicts)
        for record in equal:
            # Equal answers may belong to different questions: "Yes." answers many.
            if record.namespace != fresh.namespace and compare_texts(fresh.text, [record.text]).place is not None:
                kept = self.neighbours.confirm(record, fresh.namespace)
                if kept is not None and self._log is not None:
                    self._log.save(kept, await self.embedder.embed(kept.text), replaces=True)

    def _join(self, fresh: Record, judged: Sequence[Record], verdicts: Mapping[str, bool | None]) -> None:
        """Have names of equal answers joined, of the fresh one's tenant. The first verdict on a name counts."""
        said: dict[str, bool] = {}
        for kept in judged:
            same = verdicts[kept.entry]
            if same is not None and kept.namespace == namespace_of(kept.answer) == fresh.namespace:
                said.setdefault(self.labels.policy.name_of(kept.answer), same)
        for equal in self.labels.policy.names_to_join(said, self.labels.errors.error(fresh.model, fresh.answers)):
            self._publish(equal)

    def _update(self, comparison: Comparison, **found: str | float) -> None:
        """Sets what the judge has found out, also where the record is stored already."""
        record = comparison.record = msgspec.structs.replace(comparison.record, **found)
        kept = self.neighbours.records.change(record.entry, record.created, **found)
        if kept is not None and self._log is not None:
            self._log.save(kept, comparison.vector, replaces=True)

    def _is_replaced(self, record: Record) -> bool:
        """Whether the entry has another answer now."""
        kept = self.neighbours.records.get(record.entry)
        return kept is not None and kept.created != record.created
