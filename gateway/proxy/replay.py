"""Answers a hit from its entry."""

import asyncio

import msgspec
from aiohttp import web

from cache.entries.answer import stream_of
from cache.entries.entry import Entry
from cache.entries.outcomes import Hit
from cache.exact import ExactCache
from cache.semantic.messages import LookupHit
from gateway.metrics import HitCounter
from gateway.proxy.fast_path import RAW_DIGEST
from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.response_headers import hit_headers, semantic_headers, whole_response


class Replay:
    """Answers from entries, and keeps the rendered form and the request's digest in memory for the next hit.

    With `draws` a sampled request gets one of several stored answers, so its digest is not kept.
    """

    def __init__(self, cache: ExactCache, hits: HitCounter, draws: bool) -> None:
        self._cache = cache
        self._draws = draws
        self._hits = hits

    async def answer(
        self, request: web.BaseRequest, inference: InferenceRequest, hit: Hit, detail: str = "exact"
    ) -> web.StreamResponse:
        """Serve the entry of this same request."""
        body = await self._form(hit.entry, inference.form)
        self._hits.count(hit.entry, "exact")
        self._remember(request, inference, hit)
        return whole_response(request, hit_headers(hit.entry, hit.age, inference.form, detail), body)

    async def answer_similar(
        self, request: web.BaseRequest, inference: InferenceRequest, hit: Hit, found: LookupHit
    ) -> web.StreamResponse:
        """Serve the entry of a similar question. Nothing is kept: the next request is looked up again."""
        body = await self._form(hit.entry, inference.form)
        self._hits.count(hit.entry, found.layer)
        headers = hit_headers(hit.entry, hit.age, inference.form, found.layer, found.layer) | semantic_headers(found)
        return whole_response(request, headers, body)

    async def _form(self, entry: Entry, form: str) -> bytes:
        """The entry in the client's form, kept in its slot for the next hit."""
        memory = self._cache.memory
        slot = memory.slot(entry.id)
        if slot is None or slot.entry is not entry:
            return await render(entry.body, form)
        if form in slot.forms:
            return slot.forms[form]
        rendered = await render(entry.body, form)
        return memory.form(slot, form, lambda _: rendered)

    def _remember(self, request: web.BaseRequest, inference: InferenceRequest, hit: Hit) -> None:
        """Let the fast path answer the same bytes next time, unless the answer was drawn from variants."""
        raw_digest = request.get(RAW_DIGEST)
        slot = self._cache.memory.slot(hit.entry.id)
        drawn = self._draws and inference.sampled
        if raw_digest and slot and slot.entry is hit.entry and not drawn:
            self._cache.memory.alias(slot, raw_digest, inference.form)


_decode = msgspec.json.Decoder(dict).decode
_LARGE_BODY = 2**18


async def render(body: bytes, form: str) -> bytes:
    """The response object `body` (JSON text) in `form`: "json", "stream" or "stream+usage"."""
    if form == "json":
        return body
    if len(body) > _LARGE_BODY:  # takes milliseconds: it leaves the event loop
        return await asyncio.to_thread(_as_stream, body, form)
    return _as_stream(body, form)


def _as_stream(body: bytes, form: str) -> bytes:
    return stream_of(_decode(body), include_usage=form == "stream+usage")
