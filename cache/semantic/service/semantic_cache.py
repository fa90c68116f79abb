"""The semantic cache: a lookup, step by step."""

import asyncio
import itertools
import secrets

from cache.entries.key import namespace_of
from cache.semantic.embedding.embedder import Embedder
from cache.semantic.inspection.decisions import MIN_SIMILARITY, Decisions, StoredQuestion
from cache.semantic.judge.repeatability import is_unrepeatable, repeatable
from cache.semantic.messages import (
    AnswerStored,
    DecisionsRequest,
    EntryDeleted,
    ExplainedNeighbour,
    ExplainRequest,
    Explanation,
    HitDiscarded,
    LookupHit,
    LookupMiss,
    LookupRequest,
    Note,
    Purged,
    RefreshRequested,
    Reply,
    Request,
    WhatIfRequest,
    WrongAnswerReport,
    WrongAnswerResult,
)
from cache.semantic.policy.policy import NEIGHBOURS, Decision, Policy
from cache.semantic.policy.threshold import ThresholdPolicy
from cache.semantic.service.learner import Learner
from cache.semantic.service.neighbours import Candidate, Neighbour, candidate_of, neighbourhood_of
from cache.semantic.service.queries import Latest, Query
from cache.semantic.service.records import Record, Vector

_LONG_TEXT = 120


class SemanticCache:
    """Finds answers to questions that were asked before in other words:

    same form → embed → neighbours → vote → compare texts → decide
    """

    def __init__(self, embedder: Embedder, learner: Learner, decisions: Decisions, shares_purges: bool) -> None:
        self.decisions = decisions
        self.figures = learner.figures
        self._embedder = embedder
        self._learner = learner
        self._neighbours = learner.neighbours
        self._labels = learner.labels
        self._lookups = learner.lookups
        self._shares_purges = shares_purges
        # Not from 1: an answer that is reported to the next process must not match another question.
        self._numbers = itertools.count(secrets.randbits(62) + 1)
        self._open: Latest[int, Query] = Latest()
        self._served: Latest[str, Query] = Latest()
        # Questions that got a wrong answer: they get none of another question until they have one of their own.
        self._rejected: Latest[str, None] = Latest()

    async def handle(self, message: Request | Note) -> Reply | None:
        """The reply to a request other than a look-up, None to a note. Raises CacheError."""
        match message:
            case ExplainRequest():
                return await self.explain(message)
            case DecisionsRequest():
                return self.decisions.page(message)
            case WhatIfRequest():
                return await self.decisions.what_if(message)
            case WrongAnswerReport():
                labels = self.report_wrong_answer(message.entry)
                return WrongAnswerResult(await self._learner.forget(message.entry, wrong=True), labels)
            case AnswerStored():
                self.answered(message)
            case RefreshRequested():
                self._complain(self._served.pop(message.key, None))
            case HitDiscarded():
                if self._served.pop(message.key, None) is None:
                    self._lookups.leave(message.key)
            case EntryDeleted():
                record = self._neighbours.records.get(message.entry)
                if record is not None and message.created in (0.0, record.created):
                    await self._learner.forget(message.entry)
                self.decisions.forget_texts((message.entry,))
            case Purged():
                if not self._shares_purges:  # else they come from the store that gateways share
                    await self._learner.discard(await self._neighbours.chosen(lambda each: _is_purged(each, message)))
                self.decisions.forget_texts()
        return None

    async def ask(self, ask: LookupRequest) -> LookupHit | LookupMiss:
        """Raises EmbedderBusy and EmbeddingError if the question cannot be embedded."""
        self.figures.count("asked")
        with self._lookups.running(ask.key):
            return await self._find(ask)

    async def _find(self, ask: LookupRequest) -> LookupHit | LookupMiss:
        served = self._served.get(ask.key)
        if served is not None and served.was_just_served:
            self._complain(self._served.pop(ask.key))
        if ask.max_risk > 0 and ask.key not in self._rejected and (same := self._same_form(ask)):
            self.figures.count("normalized" if ask.serve else "observed_normalized")
            self._note(Query(ask.key, ask.partition, ask.text, same.entry, ask.serve))
            return LookupHit(0, 1.0, layer="normalized", entry=same.entry, created=same.created, audit=False)
        with self.figures.timing("embed"):
            vector = await self._embedder.embed(ask.text)
        with self.figures.timing("search"):
            near = await self._near(ask.partition, vector)
            are_repeatable = repeatable(self._labels.errors, near)
            if not all(are_repeatable):
                self.figures.count("unrepeatable")
                near = list(itertools.compress(near, are_repeatable))
        candidate = None
        if near:
            with self.figures.timing("compare"):
                candidate = await self._candidate(ask.text, near)
        return self._decide(ask, vector, candidate)

    async def _near(self, partition: str, vector: Vector) -> list[Neighbour]:
        """The neighbours of a question whose answers may go to its tenant, nearest first."""
        near, namespace = await self._neighbours.near(partition, vector), namespace_of(partition)
        return [each for each in near if self._neighbours.may_answer(each.record, namespace)][:NEIGHBOURS]

    async def _candidate(self, text: str, near: list[Neighbour], is_urgent: bool = True) -> Candidate:
        """Counts the votes which answer is meant, and compares the text with the questions that have it."""
        evidence = self._labels.policy.vote(neighbourhood_of(near))
        if len(text) > _LONG_TEXT or not is_urgent:  # reading takes milliseconds: in a thread
            return await asyncio.to_thread(candidate_of, text, near, evidence)
        return candidate_of(text, near, evidence)

    def _decide(self, ask: LookupRequest, vector: Vector, candidate: Candidate | None) -> LookupHit | LookupMiss:
        # A client that no longer waits uses nothing of the budget.
        unwanted = "rejected" if ask.key in self._rejected else "gone" if self._lookups.has_left(ask.key) else ""
        max_risk = 0.0 if unwanted else ask.max_risk
        policy = self._policy(ask)
        evidence = candidate.evidence if candidate is not None and not candidate.veto else None
        # What a veto forbids is only counted, and named, where it would be served without.
        unvetoed = policy.assess(candidate.evidence, max_risk) if candidate and candidate.veto else None
        decision = policy.decide(evidence, max_risk, compares=not ask.serve)
        stored = candidate and self._stored(policy, candidate, unvetoed or decision)
        watched = self.decisions.add(ask, decision, unwanted, stored)
        query = Query(
            key=ask.key,
            partition=ask.partition,
            text=ask.text,
            entry="" if evidence is None else evidence.entry,
            served=decision.serve and ask.serve,
            vector=vector,
            evidence=None if ask.threshold else evidence,  # outside the budget: it spends nothing, and is no label
            decision=decision,
            watched=watched,
        )
        number = next(self._numbers)
        self._open[number] = query
        if ask.threshold:
            self.figures.count("by_threshold")
        if candidate is None:
            return LookupMiss(number)
        record, similarity = candidate.neighbour
        if not decision.serve:
            veto = candidate.veto if unvetoed is not None and unvetoed.serve else ""
            if veto:
                self.figures.count_veto(veto)
            risk = None if evidence is None else decision.risk
            return LookupMiss(number, similarity, risk, record.entry, record.created, veto)
        self.figures.count("served" if ask.serve else "observed")
        self._note(query)
        return LookupHit(
            number,
            similarity,
            decision.risk,
            layer="semantic",
            entry=record.entry,
            created=record.created,
            audit=decision.audit,
        )

    def _stored(self, policy: Policy, candidate: Candidate, unvetoed: Decision) -> StoredQuestion | None:
        """The candidate's question for an operator; None where it is not near."""
        (record, similarity), evidence, veto, _ = candidate
        if similarity < MIN_SIMILARITY:
            return None
        features = policy.features(evidence)
        return StoredQuestion(record.entry, record.model, record.text, similarity, veto, unvetoed, features)

    async def explain(self, ask: ExplainRequest) -> Explanation:
        """What a lookup would say, and of which neighbours. Raises EmbedderBusy and EmbeddingError."""
        if ask.max_risk > 0 and (same := self._same_form(ask)):
            return Explanation("normalized", same.entry, 0.0, "the same question was asked, written differently")
        found = await self._near(ask.partition, await self._embedder.embed(ask.text))
        near = list(itertools.compress(found, repeatable(self._labels.errors, found)))
        if found and not near:
            return Explanation("", "", None, "answers to such questions differ each time that they are asked")
        if not near:
            return Explanation("", "", None, "nothing was asked in the same context: system prompt, tools, parameters")
        candidate, policy = await self._candidate(ask.text, near, is_urgent=False), self._policy(ask)
        decision = policy.assess(candidate.evidence, ask.max_risk)
        reason = policy.reason(candidate.evidence, decision, ask.max_risk)
        if candidate.veto:
            reason = f"the veto {candidate.veto!r} forbids the answer; without it: {reason}"
        vetoes = dict(zip(candidate.evidence.members, candidate.vetoes, strict=True))
        neighbours = tuple(
            ExplainedNeighbour(record.entry, similarity, place in vetoes, vetoes.get(place, ""))
            for place, (record, similarity) in enumerate(near)
        )
        layer = "semantic" if decision.serve and not candidate.veto else ""
        features = policy.features(candidate.evidence)
        return Explanation(layer, candidate.evidence.entry, decision.risk, reason, neighbours, features)

    def _policy(self, ask: LookupRequest | ExplainRequest) -> Policy:
        return ThresholdPolicy(ask.threshold) if ask.threshold else self._labels.policy

    def _same_form(self, ask: LookupRequest | ExplainRequest) -> Record | None:
        record = self._neighbours.same_form(ask.partition, ask.text)
        return None if record is None or is_unrepeatable(self._labels.errors, record) else record

    def answered(self, note: AnswerStored) -> None:
        """A fresh answer: to be compared with what was or would have been served, and stored."""
        self._rejected.pop(note.entry, None)
        query = self._open.pop(note.query, None)
        if query is not None and (query.partition, query.text) != (note.partition, note.text):
            query = None
        if query is not None and query.is_audit:
            self._served.pop(query.key, None)  # it is judged now, so a rejection does not count
        self._learner.record_answer(note, query)

    def report_wrong_answer(self, entry: str) -> int:
        """Learns that the last serving of an entry was wrong; returns how many labels."""
        key = next((key for key, served in reversed(self._served.items()) if served.entry == entry), None)
        return 0 if key is None else self._complain(self._served.pop(key))

    def _note(self, query: Query) -> None:
        """The answer goes to a client, unless that does not wait any more."""
        if query.served and not self._lookups.has_left(query.key):
            self._neighbours.records.use(query.entry)
            self._served[query.key] = query

    def _complain(self, served: Query | None) -> int:
        """Learns that the client rejected a served answer; returns the number of labels."""
        if served is None:
            return 0
        self.figures.count("blamed")
        self._rejected[served.key] = None
        if served.watched is not None:
            served.watched.complained()
        label = served.label(False, "user")
        if label is not None:
            self._learner.add_label(label)
        return int(label is not None)


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
