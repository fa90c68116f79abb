"""A hit, answered."""

from aiohttp import web

from cache.entries.entry import Entry
from cache.entries.outcomes import Hit
from cache.exact import ExactCache
from cache.semantic.messages import Found
from gateway.metrics import HitTally
from gateway.proxy.call import Call
from gateway.proxy.fast_lane import RAW_DIGEST
from gateway.proxy.rendering import render
from gateway.proxy.response_headers import hit_headers, semantic_headers, whole_response


class Replay:
    """Answers from entries, and remembers in memory what makes the next answer cheaper.

    `draws` says that a sampled call gets one answer of several, so that the next may get another.
    """

    def __init__(self, cache: ExactCache, hits: HitTally, draws: bool) -> None:
        self._cache = cache
        self._draws = draws
        self._hits = hits

    async def answer(self, request: web.BaseRequest, call: Call, hit: Hit, detail: str = "exact") -> web.StreamResponse:
        """The entry of this very request."""
        body = await self._form(hit.entry, call.form)
        self._hits.count(hit.entry, "exact")
        self._remember(request, call, hit)
        return whole_response(request, hit_headers(hit.entry, hit.age, call.form, detail), body)

    async def answer_near(self, request: web.BaseRequest, call: Call, hit: Hit, found: Found) -> web.StreamResponse:
        """The entry of another question, which nothing here takes for the answer to this one the next time."""
        body = await self._form(hit.entry, call.form)
        self._hits.count(hit.entry, found.layer)
        headers = hit_headers(hit.entry, hit.age, call.form, found.layer, found.layer) | semantic_headers(found)
        return whole_response(request, headers, body)

    async def _form(self, entry: Entry, form: str) -> bytes:
        """The entry in the shape that is wanted, kept ready for the next time."""
        memory = self._cache.memory
        slot = memory.slot(entry.id)
        if slot is None or slot.entry is not entry:
            return await render(entry.body, form)
        if form in slot.forms:
            return slot.forms[form]
        rendered = await render(entry.body, form)
        return memory.form(slot, form, lambda _: rendered)

    def _remember(self, request: web.BaseRequest, call: Call, hit: Hit) -> None:
        """Let the fast lane answer the same bytes next time, unless the answer was drawn among several."""
        raw_digest = request.get(RAW_DIGEST)
        slot = self._cache.memory.slot(hit.entry.id)
        drawn = self._draws and call.sampled
        if raw_digest and slot and slot.entry is hit.entry and not drawn:
            self._cache.memory.alias(slot, raw_digest, call.form)
