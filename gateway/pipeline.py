"""The request's path, from a call to its answer:

canonicalise → exact → join or lead a flight → route → relay and record → store
"""

import asyncio
import random
import time

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from cache.answer import stream_of
from cache.entry import Entry
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.key import Key
from cache.results import Bypass, Failed, Hit, Miss, Outcome
from gateway import metrics
from gateway.call import FAMILIES, Call
from gateway.errors import GatewayError, NotCached, UpstreamCut, UpstreamError
from gateway.fast_lane import RAW_DIGEST
from gateway.flight import Flight, FlightTable, Passenger
from gateway.replies import forwarded_headers, hit_headers
from gateway.router import Router
from gateway.settings import Settings
from gateway.upstream import USAGE_HEADER

_decode = msgspec.json.Decoder(dict).decode
_LARGE_BODY = 2**18


class Pipeline:
    """Answers calls. Holds no state of its own: the cache, the flights and the router do."""

    def __init__(self, settings: Settings, cache: ExactCache, flights: FlightTable, router: Router) -> None:
        self._settings = settings
        self._cache = cache
        self._flights = flights
        self._router = router
        self._hits = {family: metrics.HitCounter(family) for family in FAMILIES.values()}

    async def answer(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        """The response to a call. Raises GatewayError before the response has started, never after."""
        key, outcome = await self._look_up(call)
        if isinstance(outcome, Hit) and self._may_serve(call, outcome):
            if outcome.stale and not call.directives.accepts(outcome):
                self._revalidate(call, key)
            response = await self._replay(call, outcome, "exact")
            self._remember(request, call, key, outcome)
            return response
        if call.directives.only_if_cached:
            raise NotCached("The answer is not in the cache, and the request says only-if-cached.")
        flight, joined = self._join_or_lead(call, key, outcome)
        with flight.board() as passenger:
            return await self._relay(request, call, key, outcome, passenger, joined)

    # exact

    async def _look_up(self, call: Call) -> tuple[Key, Outcome]:
        if reason := self._bypass_reason(call):
            return call.key, Bypass(reason)
        if not self._keeps_variants(call):
            outcome = await self._cache.lookup(call.key)
            _count_lookup(outcome)
            return call.key, outcome
        return await self._draw_variant(call)

    def _bypass_reason(self, call: Call) -> str | None:
        if not self._settings.cache.enabled:
            return "disabled"
        if call.directives.no_store:
            return "no-store"
        if call.sampled and self._settings.cache.sampled == "bypass":
            return "sampled"
        return "no-cache" if call.directives.no_cache else None

    def _keeps_variants(self, call: Call) -> bool:
        return call.sampled and self._settings.cache.sampled == "variants"

    async def _draw_variant(self, call: Call) -> tuple[Key, Outcome]:
        """One of the answers kept for a sampled request; a miss, and the key to fill, while some are wanting."""
        keys = [call.key.variant(number) for number in range(self._settings.cache.variants)]
        hits: list[tuple[Key, Outcome]] = []
        for key in keys:
            outcome = await self._cache.lookup(key)
            _count_lookup(outcome)
            if not isinstance(outcome, Hit):
                return key, outcome
            hits.append((key, outcome))
        return random.choice(hits)  # noqa: S311  # which answer to repeat is no secret

    def _may_serve(self, call: Call, hit: Hit) -> bool:
        if call.needs_usage and not hit.entry.has_usage:
            return False
        if call.directives.accepts(hit):
            return True
        plain = hit.age <= call.directives.max_age and call.directives.min_fresh == 0
        return hit.stale and plain and hit.age < hit.entry.fresh_for + self._settings.cache.stale_while_revalidate

    async def _replay(self, call: Call, hit: Hit, detail: str) -> web.Response:
        entry = hit.entry
        body = await self._form(entry, call.form)
        self._hits[call.family].count(entry)
        return web.Response(body=body, headers=hit_headers(entry, hit.age, call.form, detail))

    async def _form(self, entry: Entry, form: str) -> bytes:
        """The entry in the shape that is wanted; kept ready in memory for the next time."""
        slot = self._cache.memory.slot(entry.id)
        if slot is None or slot.entry is not entry:
            return await _render(entry.body, form)
        if form in slot.forms:
            return slot.forms[form]
        rendered = await _render(entry.body, form)
        return self._cache.memory.form(slot, form, lambda _: rendered)

    def _remember(self, request: web.BaseRequest, call: Call, key: Key, hit: Hit) -> None:
        """Let the fast lane answer the same bytes next time, where nothing about the answer was chosen just now."""
        raw_digest = request.get(RAW_DIGEST)
        slot = self._cache.memory.slot(key.id)
        if raw_digest and slot and slot.entry is hit.entry and not self._keeps_variants(call):
            self._cache.memory.alias(slot, raw_digest, call.form)

    # join or lead a flight

    def _join_or_lead(self, call: Call, key: Key, outcome: Outcome) -> tuple[Flight, bool]:
        alone = isinstance(outcome, Bypass)
        # A streaming call that did not ask for usage may get none: such a flight does not serve those who did.
        has_usage, may_lack_usage = f"{key.id} usage", f"{key.id}"
        if not alone:
            wanted = (has_usage,) if call.needs_usage else (has_usage, may_lack_usage)
            if flight := self._flights.find(wanted):
                metrics.collapsed.inc()
                return flight, True
        flight = Flight(self._settings.cache.max_answer)
        name = None if alone else (may_lack_usage if call.stream and not call.include_usage else has_usage)
        keeps = not alone or call.directives.no_cache
        self._flights.launch(flight, self._compute(call, key, flight, keeps), name)
        return flight, False

    def _revalidate(self, call: Call, key: Key) -> None:
        if not self._flights.find((key.id, f"{key.id} usage")):
            flight = Flight(self._settings.cache.max_answer)
            flight.background = True
            self._flights.launch(flight, self._compute(call, key, flight, keeps=True), key.id)

    # route, record, store

    async def _compute(self, call: Call, key: Key, flight: Flight, keeps: bool) -> None:
        generation = self._cache.generation(key.namespace, call.model)
        headers = CIMultiDict(call.headers)
        if call.stream and not call.include_usage:
            headers[USAGE_HEADER] = "always"
        await flight.fly(self._router.request("POST", call.path, headers, call.body, call.model))
        if flight.status:
            metrics.upstream_first_byte_seconds.observe(flight.first_byte_seconds)
        recording = flight.recording
        if recording is None:
            if flight.status == 200:
                metrics.not_stored.labels("not whole").inc()
            return
        metrics.upstream_seconds.observe(flight.seconds)
        prompt, completion = recording.usage or (0, 0)
        metrics.upstream_tokens.labels("prompt").inc(prompt)
        metrics.upstream_tokens.labels("completion").inc(completion)
        if not keeps or "no-store" in flight.headers.get("Cache-Control", ""):
            metrics.not_stored.labels("asked not to").inc()
            return
        entry = Entry(
            id=key.id,
            proof=key.proof,
            family=call.family,
            model=call.model,
            body=recording.body,
            created=time.time(),
            fresh_for=self._settings.cache.ttl,
            generation=generation,
            has_usage=recording.usage is not None,
            prompt_tokens=prompt,
            completion_tokens=completion,
            seconds=flight.seconds,
        )
        try:
            await self._cache.store(entry)
            metrics.stored.inc()
        except StoreUnavailable:
            metrics.store_failures.labels("redis").inc()

    # relay

    async def _relay(
        self, request: web.BaseRequest, call: Call, key: Key, outcome: Outcome, passenger: Passenger, joined: bool
    ) -> web.StreamResponse:
        flight = passenger.flight
        try:
            await passenger.started()
        except UpstreamError:
            if isinstance(outcome, Hit) and self._excuses(outcome):
                return await self._replay(call, outcome, "stale-if-error")
            raise
        if flight.status >= 500 and isinstance(outcome, Hit) and self._excuses(outcome):
            return await self._replay(call, outcome, "stale-if-error")
        headers = forwarded_headers(flight.headers, outcome, key.id, joined)
        _count_forwarded(call.family, outcome)
        if flight.status == 200 and joined and flight.is_event_stream != call.stream:
            return await self._convert(call, passenger, headers)
        if flight.is_event_stream:
            return await self._stream(request, call, passenger, headers)
        return web.Response(status=flight.status, body=await passenger.body(), headers=headers)

    def _excuses(self, hit: Hit) -> bool:
        return hit.age < hit.entry.fresh_for + self._settings.cache.stale_if_error

    async def _stream(
        self, request: web.BaseRequest, call: Call, passenger: Passenger, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=passenger.flight.status, headers=headers)
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        patience = self._settings.timeouts.client
        try:
            async with asyncio.timeout(None) as deadline:
                async for piece in passenger.pieces(with_usage=call.include_usage):
                    deadline.reschedule(loop.time() + patience)
                    await response.write(piece)
                    deadline.reschedule(None)
        except GatewayError as error:
            # The status line is long gone: what can still be said is said within the stream.
            metrics.errors.labels(error.code or "").inc()
            await response.write(error.event())
        except TimeoutError:
            # A client that no longer reads. Nothing more can be told to it.
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
        return response

    async def _convert(self, call: Call, passenger: Passenger, headers: CIMultiDict[str]) -> web.Response:
        """The flight carries the other shape, stream or whole, than this client wants."""
        await passenger.landed()
        flight = passenger.flight
        if flight.recording is None:
            raise UpstreamCut(f"The upstream's answer is not whole: {flight.unstorable}.")
        body = await _render(flight.recording.body, call.form)
        headers["Content-Type"] = "text/event-stream" if call.stream else "application/json"
        return web.Response(body=body, headers=headers)


async def _render(body: bytes, form: str) -> bytes:
    """A response object in the shape a client wants."""
    if form == "json":
        return body
    if len(body) > _LARGE_BODY:  # takes more than a moment: other requests do not wait for it
        return await asyncio.to_thread(_as_stream, body, form)
    return _as_stream(body, form)


def _as_stream(body: bytes, form: str) -> bytes:
    return stream_of(_decode(body), include_usage=form == "stream+usage")


def _count_lookup(outcome: Outcome) -> None:
    match outcome:
        case Hit(tier="memory"):
            metrics.tier_lookups.labels("memory", "hit").inc()
        case Hit(tier="redis"):
            metrics.tier_lookups.labels("memory", "miss").inc()
            metrics.tier_lookups.labels("redis", "hit").inc()
        case Miss(tiers):
            for tier in tiers:
                metrics.tier_lookups.labels(tier, "miss").inc()
        case Failed():
            metrics.tier_lookups.labels("memory", "miss").inc()
            metrics.tier_lookups.labels("redis", "failed").inc()


def _count_forwarded(family: str, outcome: Outcome) -> None:
    match outcome:
        case Bypass():
            kind = "bypass"
        case Failed():
            kind = "failed"
        case _:
            kind = "miss"
    metrics.requests.labels(family, kind, "none").inc()
