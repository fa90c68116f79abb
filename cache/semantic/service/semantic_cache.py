"""The semantic cache: a lookup, step by step."""

import asyncio
import itertools
import time
from collections import Counter

from cache.entries.key import namespace_of
from cache.semantic.embedding.embedder import Embedder
from cache.semantic.inspection.decisions import Decisions, StoredQuestion, named_features
from cache.semantic.judge.error_rates import ErrorRates
from cache.semantic.judge.repeatability import is_unrepeatable, repeatable
from cache.semantic.messages import (
    AnswerStored,
    EntryDeleted,
    ExplainedNeighbour,
    ExplainRequest,
    Explanation,
    HitDiscarded,
    LookupHit,
    LookupMiss,
    LookupRequest,
    Purged,
    RefreshRequested,
    WrongAnswerReport,
    WrongAnswerResult,
)
from cache.semantic.policy.policy import NEIGHBOURS, Policy
from cache.semantic.policy.threshold import ThresholdPolicy
from cache.semantic.service.learner import Learner
from cache.semantic.service.metrics import ServiceMetrics
from cache.semantic.service.neighbours import Neighbour, Neighbours, Vector, neighbourhood_of, vouched, wording_of
from cache.semantic.service.queries import OpenQueries, Query, ServedAnswer, ServedAnswers
from cache.semantic.service.queues import LookupPriority
from cache.semantic.service.records import Record
from cache.semantic.wording.comparison import Wording

_LONG_TEXT = 120
_EXPLAINED = 5


class SemanticCache:
    """Finds answers to questions that were asked before in other words:

    same form → embed → neighbours → weigh → guards → decide
    """

    def __init__(
        self,
        embedder: Embedder,
        neighbours: Neighbours,
        policy: Policy,
        errors: ErrorRates,
        learner: Learner,
        decisions: Decisions,
        figures: ServiceMetrics,
        priority: LookupPriority,
        shares_purges: bool,
    ) -> None:
        self._embedder = embedder
        self._neighbours = neighbours
        self._policy = policy
        self._errors = errors
        self._learner = learner
        self._priority = priority
        self._queries = OpenQueries()
        self._served_answers = ServedAnswers()
        self._lookups: Counter[str] = Counter()
        self._gone: set[str] = set()
        self._shares_purges = shares_purges
        self.decisions = decisions
        self.figures = figures

    async def ask(self, ask: LookupRequest) -> LookupHit | LookupMiss:
        """Raises EmbedderBusy and EmbeddingError if the question cannot be embedded."""
        self.figures.count("asked")
        self._lookups[ask.key] += 1
        try:
            with self._priority.looking_up():
                return await self._find(ask)
        finally:
            self._lookups[ask.key] -= 1
            if not self._lookups[ask.key]:
                del self._lookups[ask.key]
                self._gone.discard(ask.key)

    async def _find(self, ask: LookupRequest) -> LookupHit | LookupMiss:
        repeated = self._served_answers.take_repeated(ask.key, time.monotonic())
        if repeated is not None:
            await self._record_complaint(repeated)
        is_disliked = self._served_answers.has_rejected(ask.key)
        if ask.max_risk > 0 and not is_disliked and (same := self._same_form(ask)):
            self.figures.count("normalized" if ask.serve else "observed_normalized")
            if ask.serve:
                self._note(ServedAnswer(ask.key, same.entry, time.monotonic()))
            return LookupHit(0, 1.0, layer="normalized", entry=same.entry, created=same.created, audit=False)
        with self.figures.timing("embed"):
            vector = await self._embedder.embed(ask.text)
        with self.figures.timing("search"):
            near = await self._near(ask.partition, vector)
            if not all(are_repeatable := repeatable(self._errors, near)):
                self.figures.count("unrepeatable")
                near = list(itertools.compress(near, are_repeatable))
        evidence, place, guard, stored = None, None, "", None
        if near:
            with self.figures.timing("guards"):
                weighed = self._policy.weigh(neighbourhood_of(near))
                if len(ask.text) > _LONG_TEXT:  # reading takes milliseconds: in a thread
                    wording = await asyncio.to_thread(wording_of, ask.text, near, weighed.members)
                else:
                    wording = wording_of(ask.text, near, weighed.members)
            place, guard = wording.place, wording.veto
            evidence = vouched(weighed, wording, near)
            stored = _stored(near[place or 0], named_features(weighed, wording))
        # A client that no longer waits uses nothing of the budget.
        unwanted = "rejected" if is_disliked else "gone" if ask.key in self._gone else ""
        max_risk = 0.0 if unwanted else ask.max_risk
        if ask.threshold:  # outside the budget: it spends nothing, and is no label
            decision = ThresholdPolicy(ask.threshold).decide(evidence, max_risk)
            self.figures.count("by_threshold")
        else:
            decision = self._policy.decide(evidence, max_risk, compares=not ask.serve)
        reason = guard or unwanted or decision.refusal
        watched = self.decisions.decided(ask, max_risk, decision, reason, stored)
        entry = "" if place is None else near[place].record.entry
        served = decision.serve and ask.serve
        judged = None if ask.threshold else evidence
        query = Query(ask.key, ask.partition, ask.text, vector, judged, entry, decision, served, watched)
        number = self._queries.open(query)
        if guard:
            self.figures.count_refusal(guard)
        if not decision.serve or evidence is None or place is None:
            risk = decision.risk if evidence else None
            if not near:
                return LookupMiss(number, None, risk, guard=guard)
            record, similarity = near[0]
            return LookupMiss(number, similarity, risk, record.entry, record.created, guard)
        self.figures.count("served" if ask.serve else "observed")
        if ask.serve:
            self._note(ServedAnswer(ask.key, entry, time.monotonic(), judged, decision, watched))
        similarity, risk = near[place].similarity, decision.risk
        created = near[place].record.created
        return LookupHit(number, similarity, risk, layer="semantic", entry=entry, created=created, audit=decision.audit)

    async def explain(self, ask: ExplainRequest) -> Explanation:
        """What a lookup would say, and of which neighbours. Raises EmbedderBusy and EmbeddingError."""
        if ask.max_risk > 0 and (same := self._same_form(ask)):
            return Explanation("normalized", same.entry, 0.0, "the same question was asked, written differently")
        vector = await self._embedder.embed(ask.text)
        found = await self._near(ask.partition, vector)
        near = list(itertools.compress(found, repeatable(self._errors, found)))
        if found and not near:
            return Explanation("", "", None, "answers to such questions differ each time that they are asked")
        if not near:
            return Explanation("", "", None, "nothing was asked in the same context: system prompt, tools, parameters")
        weighed = self._policy.weigh(neighbourhood_of(near))

        def read() -> tuple[Wording, list[str]]:
            vetoes = [wording_of(ask.text, [each], [0]).veto for each in near[:_EXPLAINED]]
            return wording_of(ask.text, near, weighed.members), vetoes

        wording, vetoes = await asyncio.to_thread(read)
        neighbours = tuple(
            ExplainedNeighbour(each.record.entry, each.similarity, refusing)
            for each, refusing in zip(near[:_EXPLAINED], vetoes, strict=True)
        )
        evidence = vouched(weighed, wording, near)
        if evidence is None:
            return Explanation("", "", None, f"the guard {wording.veto!r} refuses the nearest answer", neighbours)
        policy = ThresholdPolicy(ask.threshold) if ask.threshold else self._policy
        serve, risk, reason = policy.assess(evidence, ask.max_risk)
        return Explanation("semantic" if serve else "", evidence.entry, risk, reason, neighbours)

    async def _near(self, partition: str, vector: Vector) -> list[Neighbour]:
        """The neighbours of a question whose answers may go to its tenant, nearest first."""
        near, namespace = await self._neighbours.near(partition, vector), namespace_of(partition)
        return [each for each in near if self._neighbours.may_answer(each.record, namespace)][:NEIGHBOURS]

    def _same_form(self, ask: LookupRequest | ExplainRequest) -> Record | None:
        record = self._neighbours.same_form(ask.partition, ask.text)
        return None if record is None or is_unrepeatable(self._errors, record) else record

    async def answered(self, note: AnswerStored) -> None:
        """A fresh answer: compares it with what was or would have been served, and stores it."""
        self._served_answers.accept(note.entry)
        query = self._queries.close(note.query, note.partition, note.text)
        if query is not None and query.decision.audit:
            self._served_answers.take(query.key)  # it is judged now, so a rejection does not count
        await self._learner.record_answer(note, query)

    async def retried(self, note: RefreshRequested) -> None:
        served_answer = self._served_answers.take(note.key)
        if served_answer is not None:
            await self._record_complaint(served_answer)

    async def unused(self, note: HitDiscarded) -> None:
        """The client does not wait for the answer; its lookup may still be running."""
        if self._served_answers.take(note.key) is None and note.key in self._lookups:
            self._gone.add(note.key)

    async def wrong(self, message: WrongAnswerReport) -> WrongAnswerResult:
        labels = await self.report_wrong_answer(message.entry)
        return WrongAnswerResult(await self._learner.forget(message.entry, wrong=True), labels)

    async def report_wrong_answer(self, entry: str) -> int:
        """Learns that the last serving of an entry was wrong; returns how many labels."""
        served_answer = self._served_answers.take_latest_of(entry)
        return 0 if served_answer is None else await self._record_complaint(served_answer)

    async def forget(self, note: EntryDeleted) -> None:
        record = self._neighbours.records.get(note.entry)
        if record is not None and note.created in (0.0, record.created):
            await self._learner.forget(note.entry)

    async def purged(self, note: Purged) -> None:
        """Removes purged records; with a store that gateways share, purges come from there."""
        if not self._shares_purges:
            await self._learner.discard(
                [record.entry for record in self._neighbours.records if _is_purged(record, note)]
            )

    def _note(self, served_answer: ServedAnswer) -> None:
        if served_answer.key not in self._gone:
            self._neighbours.records.use(served_answer.entry)
            self._served_answers.note(served_answer)

    async def _record_complaint(self, served_answer: ServedAnswer) -> int:
        """Learns that the client rejected a served answer; returns the number of labels."""
        self.figures.count("blamed")
        self._served_answers.reject(served_answer.key)
        if served_answer.watched is not None:
            served_answer.watched.complained()
        label = served_answer.label()
        if label is None:
            return 0
        await self._learner.add_label(label)
        return 1


def _stored(neighbour: Neighbour, features: dict[str, float]) -> StoredQuestion:
    record = neighbour.record
    return StoredQuestion(record.entry, record.model, record.text, neighbour.similarity, features)


def _is_purged(record: Record, note: Purged) -> bool:
    match note.scope:
        case "model":
            return record.model == note.name
        case "namespace":
            return record.namespace == note.name
        case "before" | "layer":
            return record.created < note.before
        case "tags" | "tag":
            return False  # who finds it sees that its entry is gone
        case "all":
            return True
