"""The semantic cache, as the request's path sees it: asked after a miss, told of every fresh answer."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from cache.entries.entry import Entry
from cache.entries.generations import Scope
from cache.entries.key import Key, namespace_of
from cache.entries.outcomes import Bypass, Hit, Miss, Outcome
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.semantic.client import SemanticClient
from cache.semantic.messages import (
    MOST_BODY,
    Advice,
    Answered,
    Ask,
    Describe,
    Description,
    Evicted,
    Forget,
    Found,
    NotFound,
    Purged,
    Retried,
    Unused,
    Wrong,
)
from gateway import metrics
from gateway.http.tasks import Tasks
from gateway.proxy.call import Call
from gateway.settings.settings import Settings

# Where nobody waits for the answer.
_PATIENCE = 2.0


@dataclass(slots=True)
class Inquiry:
    """What the semantic cache says, to all who ask the same at the same time; `asking` is the task that asks it.

    `hit` is there where an answer may be served, and with `audit`, until somebody has seen to it, the upstream is to
    be asked all the same. An inquiry that is not `open` is not told the answer.
    """

    open: bool = False
    asking: asyncio.Task[None] | None = None
    reply: Advice | None = None
    hit: Hit | None = None
    audit: bool = False

    async def settled(self) -> None:
        """Wait for the reply, if there is to be one."""
        if self.asking is not None:
            await asyncio.wait({self.asking})


NOT_ASKED = Inquiry()


class Semantic:
    """Asks the service of the semantic cache under the operator's rules and the client's. It never fails a request."""

    def __init__(self, client: SemanticClient | None, cache: ExactCache, settings: Settings, tasks: Tasks) -> None:
        self._client = client
        self._cache = cache
        self._mode = settings.semantic.mode
        self._published = settings.semantic.published
        self._draws = settings.cache.sampled == "variants"
        self._tasks = tasks
        self._under_way: dict[tuple[str, float], Inquiry] = {}

    async def find(self, call: Call, key: Key, outcome: Outcome) -> Inquiry:
        """An answer to another question that may be served for this one, after the exact cache had none."""
        question = call.question
        inquiry = self.unasked(call)
        if self._client is None or question is None or not inquiry.open:
            return NOT_ASKED
        if isinstance(outcome, Bypass):
            if outcome.reason != "no-cache":
                return NOT_ASKED
            await self._client.note(Retried(key.id))
            return inquiry
        if isinstance(outcome, Hit):  # too old: whoever asks wants a new answer to this very question
            return inquiry
        serves = self._mode == "on"
        ask = Ask(key.id, question.partition, question.text, call.most_risk, serves)
        inquiry = self._join_or_ask(self._client, ask)
        if not serves:
            return inquiry
        await inquiry.settled()
        if inquiry.hit is None or _takes(call, inquiry.hit):
            return inquiry
        await self._client.note(Unused(key.id))
        return replace(inquiry, hit=None)

    def unasked(self, call: Call) -> Inquiry:
        """For an answer that is computed although the cache has one."""
        return NOT_ASKED if call.question is None or (self._draws and call.sampled) else Inquiry(open=True)

    async def answered(self, call: Call, inquiry: Inquiry, entry: Entry) -> None:
        """Tell of a fresh answer that is kept under `entry`."""
        if self._client is None or not inquiry.open or call.question is None:
            return
        await inquiry.settled()
        number = inquiry.reply.inquiry if inquiry.reply is not None else 0
        partition, text = call.question
        expires = entry.created + entry.fresh_for
        body = entry.body if len(entry.body) <= MOST_BODY else b""
        created = entry.created
        await self._client.note(
            Answered(number, entry.id, partition, text, entry.model, entry.generation, created, expires, body)
        )

    async def forget(self, entry_id: str) -> None:
        """An entry has been deleted."""
        if self._client is not None:
            await self._client.note(Forget(entry_id))

    async def purged(self, scope: Scope, name: str) -> None:
        """Every entry of a scope has been purged."""
        if self._client is not None:
            await self._client.note(Purged(scope, name))

    async def wrong(self, entry_id: str) -> Evicted:
        """What was served from an entry was wrong. Raises StoreUnavailable."""
        if self._client is None:
            return Evicted(False, 0)
        return await self._client.ask(Wrong(entry_id), Evicted, _PATIENCE)

    async def describe(self) -> dict[str, Any]:
        """The figures of this host's semantic cache."""
        figures: dict[str, Any] = {"mode": self._mode}
        if self._client is None:
            return figures
        try:
            description = await self._client.ask(Describe(), Description, _PATIENCE)
        except StoreUnavailable as error:
            return {**figures, "available": False, "reason": str(error)}
        return {**figures, "available": True, **description.figures}

    async def measure(self) -> None:
        """Copy what an operator may want to be alarmed by into the metrics."""
        if self._client is None:
            return
        figures = await self.describe()
        metrics.semantic_available.set(bool(figures["available"]))
        if figures["available"]:
            metrics.semantic_entries.set(figures["entries"])
            metrics.show_policy(figures["policy"])

    def _join_or_ask(self, client: SemanticClient, ask: Ask) -> Inquiry:
        """The inquiry of others who are asking the same, or a new one. It is a task, and belongs to none of them."""
        name = (ask.key, ask.most_risk)
        if name not in self._under_way:
            inquiry = self._under_way[name] = Inquiry(open=True)
            inquiry.asking = self._tasks.start_alone(self._ask(client, inquiry, ask))
            inquiry.asking.add_done_callback(lambda _: self._under_way.pop(name))
        return self._under_way[name]

    async def _ask(self, client: SemanticClient, inquiry: Inquiry, ask: Ask) -> None:
        try:
            with metrics.semantic_seconds.time():
                reply = await client.ask(ask, Advice, None if ask.serve else _PATIENCE)
            self._check(ask, reply)
        except StoreUnavailable:
            metrics.semantic_asked.labels("failed").inc()
            await client.note(Unused(ask.key))  # it may have been found too late
            return
        inquiry.reply = reply
        metrics.semantic_asked.labels("found" if isinstance(reply, Found) else "not found").inc()
        if isinstance(reply, NotFound) and reply.guard:
            metrics.semantic_refusals.labels(reply.guard).inc()
        if isinstance(reply, Found) and ask.serve:
            inquiry.hit = await self._fetch(client, reply)
            inquiry.audit = reply.audit
            if inquiry.hit is None:
                await client.note(Unused(ask.key))

    def _check(self, ask: Ask, reply: Advice) -> None:
        """Raises StoreUnavailable for an entry of which this tenant must not know: the service is not to be trusted."""
        if isinstance(reply, Found) and namespace_of(reply.entry) not in (namespace_of(ask.key), *self._published):
            raise StoreUnavailable("the semantic cache: an entry of another tenant")

    async def _fetch(self, client: SemanticClient, found: Found) -> Hit | None:
        """The entry as a hit, where it is there and still the one that was found."""
        outcome = await self._cache.recall(found.entry)
        if isinstance(outcome, Hit) and outcome.entry.created == found.created:
            return outcome
        if isinstance(outcome, Hit | Miss):
            await client.note(Forget(found.entry, found.created))
        return None


def _takes(call: Call, hit: Hit) -> bool:
    """Whether the client takes an answer to another question than its own."""
    return call.directives.accepts(hit) and (hit.entry.has_usage or not call.needs_usage)
