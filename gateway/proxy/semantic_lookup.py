"""The semantic lookup: asks the semantic cache after an exact miss, and reports each new answer to it."""

import asyncio
import random
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from cache.entries.entry import Entry
from cache.entries.generations import Purge
from cache.entries.key import Key, namespace_of
from cache.entries.outcomes import Bypass, Hit, Miss, Outcome
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.semantic.client import SemanticClient
from cache.semantic.messages import (
    MAX_BODY,
    AnswerStored,
    DecisionsReply,
    DecisionsRequest,
    EntryDeleted,
    ExplainRequest,
    Explanation,
    HitDiscarded,
    LookupHit,
    LookupMiss,
    LookupReply,
    LookupRequest,
    Purged,
    RefreshRequested,
    Stats,
    StatsRequest,
    WhatIfReply,
    WhatIfRequest,
    WrongAnswerReport,
    WrongAnswerResult,
)
from gateway import metrics
from gateway.http.background_tasks import BackgroundTasks
from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.lookup import ASKING_FOR_NEW
from gateway.settings.settings import Settings
from telemetry.tracing.span import Span

# In the background.
_BACKGROUND_TIMEOUT = 2.0
# Ten thousand requests are counted anew for each delta that is not counted all along.
_RECOUNT_TIMEOUT = 20.0


@dataclass(slots=True)
class SemanticQuery:
    """One query to the semantic cache, shared by all requests that ask the same at the same time; `task` runs it.

    `hit` is set if an answer may be served. With `audit` the upstream is asked as well, once. If the query is not
    `open`, the answer is not reported to the semantic cache.
    """

    open: bool = False
    task: asyncio.Task[None] | None = None
    reply: LookupReply | None = None
    hit: Hit | None = None
    audit: bool = False

    async def settled(self) -> None:
        """Wait until the reply is there or has failed."""
        if self.task is not None:
            await asyncio.wait({self.task})


NO_QUERY = SemanticQuery()


class SemanticLookup:
    """Asks the semantic cache's process, under the settings and the client's headers. It never fails a request."""

    def __init__(
        self, client: SemanticClient | None, cache: ExactCache, settings: Settings, tasks: BackgroundTasks
    ) -> None:
        self._client = client
        self._cache = cache
        self._mode = settings.semantic.mode
        self._audit_share = settings.semantic.audit_share
        self._published = settings.semantic.published
        self._draws = settings.cache.sampled == "variants"
        self._tasks = tasks
        self._in_flight: dict[tuple[str, float, float], SemanticQuery] = {}

    async def find(self, inference: InferenceRequest, key: Key, outcome: Outcome, span: Span) -> SemanticQuery:
        """The stored answer of a similar question that may be served, after an exact miss; `span` is of this search."""
        question = inference.question
        query = self.unsent_query(inference)
        if self._client is None or question is None or not query.open:
            return NO_QUERY
        if isinstance(outcome, Bypass):
            if outcome.reason not in ASKING_FOR_NEW:
                return NO_QUERY
            await self._client.note(RefreshRequested(key.id))
            return query
        if isinstance(outcome, Hit):  # stale: the client wants a new answer to this same question
            return query
        serves = self._mode == "on"
        ask = LookupRequest(
            question.partition,
            question.text,
            inference.max_risk,
            inference.threshold,
            key=key.id,
            serve=serves,
            traceparent=span.headers().get("traceparent", ""),
        )
        query = self._join_or_ask(self._client, ask)
        if not serves:
            return query
        await query.settled()
        if query.hit is None or _accepts(inference, query.hit):
            return query
        await self._client.note(HitDiscarded(key.id))
        return replace(query, hit=None)

    async def explain(self, inference: InferenceRequest) -> Explanation:
        """What the semantic cache would say to a request, for an operator. Raises StoreUnavailable."""
        question = inference.question
        if self._client is None or self._mode == "off":
            return Explanation("", "", None, "the semantic cache is off")
        if question is None:
            return Explanation("", "", None, "the last turn is not a text of a user, or is too long to be compared")
        if not self.unsent_query(inference).open:
            return Explanation("", "", None, "answers to sampled requests are drawn from stored variants")
        ask = ExplainRequest(question.partition, question.text, inference.max_risk, inference.threshold)
        found = await self._client.ask(ask, Explanation, _BACKGROUND_TIMEOUT)
        if self._mode == "observe" and found.layer:
            reason = f"{found.reason}; in the mode observe it is compared and not served"
            return msgspec.structs.replace(found, layer="", reason=reason)
        return found

    def unsent_query(self, inference: InferenceRequest) -> SemanticQuery:
        """A query that is not sent, for an answer that is computed although the cache has one."""
        return (
            NO_QUERY if inference.question is None or (self._draws and inference.sampled) else SemanticQuery(open=True)
        )

    def audits(self, inference: InferenceRequest) -> bool:
        """Whether an answer from the exact cache is computed again as well, by chance.

        Two answers to the very same question show how many same answers the judge recognises, and which questions have
        none that could be served to others.
        """
        return self._client is not None and self.unsent_query(inference).open and self._draws_audit()

    def _draws_audit(self) -> bool:
        return random.random() < self._audit_share  # noqa: S311  # which hits are audited is no secret

    async def record(self, inference: InferenceRequest, query: SemanticQuery, entry: Entry) -> None:
        """Report a new answer, stored as `entry`."""
        if self._client is None or not query.open or inference.question is None:
            return
        await query.settled()
        number = query.reply.query if query.reply is not None else 0
        partition, text = inference.question
        expires = entry.created + entry.fresh_for
        body = entry.body if len(entry.body) <= MAX_BODY else b""
        created = entry.created
        await self._client.note(
            AnswerStored(number, entry.id, partition, text, entry.model, entry.generation, created, expires, body)
        )

    async def forget(self, entry_id: str) -> None:
        """Report that an entry has been deleted."""
        if self._client is not None:
            await self._client.note(EntryDeleted(entry_id))

    async def purged(self, purge: Purge) -> None:
        """Report that every entry that the purge covers has been purged."""
        if self._client is not None:
            await self._client.note(Purged(purge))

    async def wrong(self, entry_id: str) -> WrongAnswerResult:
        """Report that the answer served from an entry was wrong. Raises StoreUnavailable."""
        if self._client is None:
            return WrongAnswerResult(False, 0)
        return await self._client.ask(WrongAnswerReport(entry_id), WrongAnswerResult, _BACKGROUND_TIMEOUT)

    async def describe(self) -> dict[str, Any]:
        """The figures of this host's semantic cache."""
        figures: dict[str, Any] = {"mode": self._mode}
        if self._client is None:
            return figures
        try:
            description = await self._client.ask(StatsRequest(), Stats, _BACKGROUND_TIMEOUT)
        except StoreUnavailable as error:
            return {**figures, "available": False, "reason": str(error)}
        return {**figures, "available": True, **description.figures}

    async def decisions(self, wanted: DecisionsRequest) -> DecisionsReply:
        """The last decisions of this host's semantic cache. Raises StoreUnavailable."""
        if self._client is None:
            return DecisionsReply((), 0)
        return await self._client.ask(wanted, DecisionsReply, _BACKGROUND_TIMEOUT)

    async def what_if(self, wanted: WhatIfRequest) -> WhatIfReply:
        """What this host would have served with other deltas. Raises StoreUnavailable."""
        if self._client is None:
            return WhatIfReply(None, ())
        return await self._client.ask(wanted, WhatIfReply, _RECOUNT_TIMEOUT)

    async def measure(self) -> None:
        """Copy the figures that alerts are built on into the metrics."""
        if self._client is None:
            return
        figures = await self.describe()
        metrics.semantic_available.set(bool(figures["available"]))
        if figures["available"]:
            metrics.semantic_entries.set(figures["entries"])
            metrics.semantic_embedder_available.set(bool(figures["embedder"]["available"]))
            metrics.semantic_embedder_failures.set(figures["embedder"]["failures"])
            metrics.semantic_reembedding_left.set(figures["reembedding"]["left"])
            if figures["recall_at_1"] is not None:
                metrics.semantic_recall_at_1.set(figures["recall_at_1"])
            metrics.show_policy(figures["policy"])

    def _join_or_ask(self, client: SemanticClient, ask: LookupRequest) -> SemanticQuery:
        """The running query for the same question, or a new one. Its task is owned by no request."""
        name = (ask.key, ask.max_risk, ask.threshold)
        if name not in self._in_flight:
            query = self._in_flight[name] = SemanticQuery(open=True)
            query.task = self._tasks.start_isolated(self._ask(client, query, ask))
            query.task.add_done_callback(lambda _: self._in_flight.pop(name))
        return self._in_flight[name]

    async def _ask(self, client: SemanticClient, query: SemanticQuery, ask: LookupRequest) -> None:
        try:
            with metrics.semantic_lookup_seconds.time():
                reply = await client.ask(ask, LookupReply, None if ask.serve else _BACKGROUND_TIMEOUT)
            self._check(ask, reply)
        except StoreUnavailable:
            metrics.semantic_lookups.labels("failed").inc()
            await client.note(HitDiscarded(ask.key))  # it may have been found too late
            return
        query.reply = reply
        metrics.semantic_lookups.labels("found" if isinstance(reply, LookupHit) else "not found").inc()
        if isinstance(reply, LookupMiss) and reply.veto:
            metrics.semantic_vetoes.labels(reply.veto).inc()
        if isinstance(reply, LookupHit) and ask.serve:
            query.hit = await self._fetch(client, reply)
            # An answer to the same question, written differently, is audited for the judge's sake.
            query.audit = reply.audit or (reply.layer == "normalized" and self._draws_audit())
            if query.hit is None:
                await client.note(HitDiscarded(ask.key))

    def _check(self, ask: LookupRequest, reply: LookupReply) -> None:
        """Raises StoreUnavailable for an entry of another tenant: the service has failed, and its reply is not used."""
        if reply.entry and namespace_of(reply.entry) not in (namespace_of(ask.key), *self._published):
            raise StoreUnavailable("the semantic cache: an entry of another tenant")

    async def _fetch(self, client: SemanticClient, found: LookupHit) -> Hit | None:
        """The entry as a hit, if it is still stored and unchanged since it was found."""
        outcome = await self._cache.lookup_by_id(found.entry)
        # The service may not have heard of a purge of the layer, or learn an answer of before it only now.
        is_current = found.created >= self._cache.purged_before("semantic")
        if isinstance(outcome, Hit) and outcome.entry.created == found.created and is_current:
            return outcome
        if isinstance(outcome, Hit | Miss):
            await client.note(EntryDeleted(found.entry, found.created))
        return None


def _accepts(inference: InferenceRequest, hit: Hit) -> bool:
    """Whether the client accepts this answer, given for a similar question."""
    return inference.cache_control.accepts(hit) and (hit.entry.has_usage or not inference.needs_usage)
