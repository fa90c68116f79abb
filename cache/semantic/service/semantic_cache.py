"""The semantic cache: a lookup, step by step."""

import asyncio
import itertools
import secrets
import time

from cache.entries.key import namespace_of
from cache.semantic import messages
from cache.semantic.embedding.embedder import Embedder
from cache.semantic.embedding.encoder import Vector
from cache.semantic.inspection.decisions import Decisions
from cache.semantic.judge.repeatability import is_unrepeatable, repeatable
from cache.semantic.policy.policy import LEAST_COMPARED, NEIGHBOURS, Decision, Policy, ThresholdPolicy
from cache.semantic.service.learner import Learner
from cache.semantic.service.lookups import Latest, Query
from cache.semantic.service.neighbours import Candidate, Neighbour, candidate_of
from cache.semantic.service.records import Record

_LONG_TEXT = 120
# A repeat within this time counts as a rejection of the served answer.
_REGENERATE_SECONDS = 10.0


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

    async def handle(self, message: messages.Request | messages.Note) -> messages.Reply | None:
        """The reply to a request other than a look-up, None to a note. Raises CacheError."""
        match message:
            case messages.ExplainRequest():
                return await self.explain(message)
            case messages.DecisionsRequest():
                return self.decisions.page(message)
            case messages.WhatIfRequest():
                return await self.decisions.what_if(message)
            case messages.WrongAnswerReport():
                labels = self.report_wrong_answer(message.entry)
                return messages.WrongAnswerResult(await self._learner.forget(message.entry, wrong=True), labels)
            case messages.AnswerStored():
                self.answered(message)
            case messages.RefreshRequested():
                self._complain(message.key)
            case messages.HitDiscarded():
                if self._served.pop(message.key, None) is None:
                    self._lookups.leave(message.key)
            case messages.EntryDeleted():
                record = self._neighbours.records.get(message.entry)
                if record is not None and message.created in (0.0, record.created):
                    await self._learner.forget(message.entry)
                self.decisions.forget_texts((message.entry,))
            case messages.Purged():
                if not self._shares_purges:  # else they come from the store that gateways share
                    covers = message.purge.covers
                    await self._learner.discard(lambda each: covers(each.namespace, each.model, each.created))
                self.decisions.forget_texts()
        return None

    async def ask(self, ask: messages.LookupRequest) -> messages.HitOrMiss:
        """Raises EmbeddingFailed if the question cannot be embedded."""
        self.figures.counts["asked"] += 1
        with self._lookups.running(ask.key):
            return await self._find(ask)

    async def _find(self, ask: messages.LookupRequest) -> messages.HitOrMiss:
        served = self._served.get(ask.key)
        if served is not None and time.monotonic() - served.time <= _REGENERATE_SECONDS:
            self._complain(ask.key)
        if ask.key not in self._rejected and (same := self._same_form(ask)):
            self.figures.counts["normalized" if ask.serve else "observed_normalized"] += 1
            self._note_hit(Query(ask, same.entry))
            return messages.LookupHit(0, 1.0, None, same.entry, same.created, layer="normalized", audit=False)
        with self.figures.timing("embed"):
            vector = await self._embedder.embed(ask.text)
        with self.figures.timing("search"):
            near, has_unrepeatable = await self._near(ask.partition, vector)
        if has_unrepeatable:
            self.figures.counts["unrepeatable"] += 1
        candidate = None
        if near:
            with self.figures.timing("compare"):
                candidate = await self._candidate(ask, near)
        return self._decide(ask, vector, candidate)

    def _same_form(self, ask: messages.QuestionRequest) -> Record | None:
        record = self._neighbours.same_form(ask.partition, ask.text) if ask.max_risk > 0 else None
        return None if record is None or is_unrepeatable(self._labels.errors, record) else record

    async def _near(self, partition: str, vector: Vector) -> tuple[list[Neighbour], bool]:
        """The neighbours of a question whose answers may go to its tenant, nearest first; and whether some were left
        out, because their answers probably differ each time that they are asked.
        """
        near, namespace = await self._neighbours.near(partition, vector), namespace_of(partition)
        near = [each for each in near if self._neighbours.may_answer(each.record, namespace)][:NEIGHBOURS]
        are_repeatable = repeatable(self._labels.errors, near)
        return list(itertools.compress(near, are_repeatable)), not all(are_repeatable)

    async def _candidate(self, ask: messages.QuestionRequest, near: list[Neighbour]) -> Candidate:
        """Has the policy say which answer is meant, and compares the text with the questions that have it."""
        evidence = self._policy(ask).vote([(record.answer, similarity) for record, similarity in near])
        # Reading a long text takes milliseconds; an operator's question can wait for a thread as well.
        if len(ask.text) > _LONG_TEXT or isinstance(ask, messages.ExplainRequest):
            return await asyncio.to_thread(candidate_of, ask.text, near, evidence)
        return candidate_of(ask.text, near, evidence)

    def _policy(self, ask: messages.QuestionRequest) -> Policy:
        return ThresholdPolicy(ask.threshold) if ask.threshold else self._labels.policy

    def _decide(self, ask: messages.LookupRequest, vector: Vector, candidate: Candidate | None) -> messages.HitOrMiss:
        # A client that no longer waits uses nothing of the budget.
        unwanted = "rejected" if ask.key in self._rejected else "gone" if self._lookups.has_left(ask.key) else ""
        max_risk = 0.0 if unwanted else ask.max_risk
        policy = self._policy(ask)
        evidence = candidate.evidence if candidate is not None and not candidate.veto else None
        # What a veto forbids is only counted, and named, where it would be served without.
        unvetoed = policy.assess(candidate.evidence, max_risk) if candidate and candidate.veto else None
        decision = policy.decide(evidence, max_risk, compares=not ask.serve)
        shown = None
        if candidate is not None and candidate.neighbour.similarity >= LEAST_COMPARED:
            shown = _shown(ask, candidate, policy, unvetoed or decision, unwanted)
            if self.decisions.shows_questions:
                shown.question, shown.stored_question = ask.text, candidate.neighbour.record.text
        watched = self.decisions.add(ask, decision, max_risk, shown)
        # With a threshold of its own a request is outside the budget: it spends nothing, and is no label.
        learned = None if ask.threshold else evidence
        entry = "" if candidate is None or candidate.veto else candidate.neighbour.record.entry
        query = Query(ask, entry, vector, learned, decision, watched)
        number = next(self._numbers)
        self._open[number] = query
        if ask.threshold:
            self.figures.counts["by_threshold"] += 1
        if candidate is None:
            return messages.LookupMiss(number)
        record, similarity = candidate.neighbour
        found = number, similarity, None if evidence is None else decision.risk, record.entry, record.created
        if not decision.serve:
            veto = candidate.veto if unvetoed is not None and unvetoed.serve else ""
            if veto:
                self.figures.vetoes[veto] += 1
            return messages.LookupMiss(*found, veto)
        self.figures.counts["served" if ask.serve else "observed"] += 1
        self._note_hit(query)
        return messages.LookupHit(*found, layer="semantic", audit=decision.audit)

    async def explain(self, ask: messages.ExplainRequest) -> messages.Explanation:
        """What a lookup would say, and of which neighbours. Raises EmbeddingFailed."""
        if same := self._same_form(ask):
            reason = "the same question was asked, written differently"
            return messages.Explanation("normalized", same.entry, 0.0, reason)
        near, has_unrepeatable = await self._near(ask.partition, await self._embedder.embed(ask.text))
        if not near:
            reason = "nothing was asked in the same context: system prompt, tools, parameters"
            if has_unrepeatable:
                reason = "answers to such questions differ each time that they are asked"
            return messages.Explanation("", "", None, reason)
        candidate, policy = await self._candidate(ask, near), self._policy(ask)
        evidence, entry = candidate.evidence, candidate.neighbour.record.entry
        decision = policy.assess(evidence, ask.max_risk)
        reason = policy.reason(evidence, decision, ask.max_risk)
        if candidate.veto:
            reason = f"the veto {candidate.veto!r} forbids the answer; without it: {reason}"
        vetoes = dict(zip(evidence.members, candidate.vetoes, strict=True))
        neighbours = tuple(
            messages.ExplainedNeighbour(record.entry, similarity, place in vetoes, vetoes.get(place, ""))
            for place, (record, similarity) in enumerate(near)
        )
        layer = "semantic" if decision.serve and not candidate.veto else ""
        return messages.Explanation(layer, entry, decision.risk, reason, neighbours, policy.features(evidence))

    def answered(self, note: messages.AnswerStored) -> None:
        """A fresh answer: to be compared with what was or would have been served, and stored."""
        self._rejected.pop(note.entry, None)
        query = self._open.pop(note.query, None)
        if query is not None and (query.ask.partition, query.ask.text) != (note.partition, note.text):
            query = None
        if query is not None and query.is_audit:
            self._served.pop(query.ask.key, None)  # it is judged now, so a rejection does not count
        self._learner.record_answer(note, query)

    def report_wrong_answer(self, entry: str) -> int:
        """Learns that the last serving of an entry was wrong; returns how many labels."""
        key = next((key for key, served in reversed(self._served.items()) if served.entry == entry), None)
        return 0 if key is None else self._complain(key)

    def _note_hit(self, query: Query) -> None:
        """The answer goes to the client, if there is one that still waits."""
        if query.ask.serve and not self._lookups.has_left(query.ask.key):
            self._neighbours.records.use(query.entry)
            self._served[query.ask.key] = query

    def _complain(self, key: str) -> int:
        """Learns that the client rejected the answer that was served for this key; returns the number of labels."""
        served = self._served.pop(key, None)
        if served is None:
            return 0
        self.figures.counts["blamed"] += 1
        self._rejected[key] = None
        if served.watched is not None:
            served.watched.complained()
        return int(self._learner.add_label(served, False, "user"))


def _shown(
    ask: messages.LookupRequest, candidate: Candidate, policy: Policy, unvetoed: Decision, unwanted: str
) -> messages.SemanticDecision:
    """A decision as an operator sees it. `unvetoed` is what is decided without regard to a veto, and `unwanted` why the
    client wants no answer whatever the risk, "" where it wants one.
    """
    record, similarity = candidate.neighbour
    outcome: messages.Outcome = "refused"
    if unvetoed.serve:
        outcome = "vetoed" if candidate.veto else "served" if ask.serve else "observed"
    return messages.SemanticDecision(
        id=0,
        time=time.time(),
        key=ask.key,
        namespace=namespace_of(ask.key),
        entry=record.entry,
        model=record.model,
        similarity=similarity,
        veto=candidate.veto,
        features=policy.features(candidate.evidence),
        risk=unvetoed.risk,
        limit=unvetoed.limit,
        max_risk=ask.max_risk,
        threshold=ask.threshold or None,
        outcome=outcome,
        reason=candidate.veto if outcome == "vetoed" else unwanted or unvetoed.refusal,
        audit=unvetoed.audit and ask.serve,
    )
