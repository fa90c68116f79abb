"""Answers a hit from its entry."""

from aiohttp import web

from cache.entries.entry import Entry
from cache.entries.outcomes import Hit
from cache.exact import ExactCache
from cache.semantic.messages import LookupHit
from gateway.proxy.conversations import ConversationKeeper
from gateway.proxy.fast_path import RAW_DIGEST
from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.metering.accounting import Accounting
from gateway.proxy.metering.records import describe_hit
from gateway.proxy.rendering import render
from gateway.proxy.response_headers import hit_headers, semantic_headers, whole_response
from gateway.telemetry.record import RECORD


class Replay:
    """Answers from entries, and keeps the rendered form and the request's digest in memory for the next hit.

    With `varies` a sampled request may get another answer the next time, so its digest is not kept.
    """

    def __init__(
        self, cache: ExactCache, conversations: ConversationKeeper, accounting: Accounting, varies: bool
    ) -> None:
        self._cache = cache
        self._conversations = conversations
        self._varies = varies
        self._accounting = accounting

    async def answer(
        self, request: web.BaseRequest, inference: InferenceRequest, hit: Hit, detail: str = "exact"
    ) -> web.StreamResponse:
        """Serve the entry of this same request."""
        body = await self._form(hit.entry, inference)
        self._accounting.exact_hit(inference, hit.entry)
        describe_hit(request[RECORD], hit.entry, inference.family, "exact", hit.entry.repeat_cost)
        self._remember(request, inference, hit)
        return whole_response(request, hit_headers(hit.entry, hit.age, inference.form, detail), body)

    async def answer_similar(
        self, request: web.BaseRequest, inference: InferenceRequest, hit: Hit, found: LookupHit
    ) -> web.StreamResponse:
        """Serve the entry of a similar question. Nothing is kept: the next request is looked up again."""
        body = await self._form(hit.entry, inference)
        saving = self._accounting.similar_hit(inference, hit.entry, found.layer)
        describe_hit(request[RECORD], hit.entry, inference.family, found.layer, saving)
        headers = hit_headers(hit.entry, hit.age, inference.form, found.layer, found.layer, saving) | semantic_headers(
            found
        )
        return whole_response(request, headers, body)

    async def _form(self, entry: Entry, inference: InferenceRequest) -> bytes:
        """The entry in the client's form, kept in its slot for the next hit."""
        memory, form = self._cache.memory, inference.form
        slot = memory.slot(entry.id)
        if inference.asked.echo and entry.proof != inference.key.proof:
            slot = None  # its id is continued with this question: it is not that of the question that was stored
        if slot is not None and slot.entry is entry and form in slot.forms:
            return slot.forms[form]
        rendered = await render(entry.body, entry.family, inference)
        if rendered.answer is not None and not await self._conversations.keep(inference, rendered.answer):
            return rendered.body  # not remembered: the next hit tries again to keep it
        if slot is None or slot.entry is not entry:
            return rendered.body
        return memory.form(slot, form, lambda _: rendered.body)

    def _remember(self, request: web.BaseRequest, inference: InferenceRequest, hit: Hit) -> None:
        """Let the fast path answer the same bytes next time, unless that may get another answer."""
        raw_digest = request.get(RAW_DIGEST)
        slot = self._cache.memory.slot(hit.entry.id)
        varies = self._varies and inference.sampled
        if raw_digest and slot and slot.entry is hit.entry and not varies:
            self._cache.memory.alias(slot, raw_digest, inference.form)
