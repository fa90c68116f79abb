"""The request's path, from a call to its answer:

canonicalise → exact → semantic → join or lead a flight → route → relay and record → store

Nothing is waited for between the last look at what is known and the flight, so what has landed or is under way is
always seen, and nothing is computed twice.
"""

from aiohttp import web

from cache.entries.key import Key
from cache.entries.outcomes import Hit
from cache.semantic.messages import Found
from gateway.errors import NotCached, UpstreamError
from gateway.proxy.call import Call
from gateway.proxy.lookup import Lookup
from gateway.proxy.relay import Relay
from gateway.proxy.replay import Replay
from gateway.proxy.semantic_lookup import NOT_ASKED, Semantic
from gateway.proxy.single_flight import SingleFlight


class Pipeline:
    """Answers calls, one step after the other."""

    def __init__(
        self, lookup: Lookup, semantic: Semantic, replay: Replay, single_flight: SingleFlight, relay: Relay
    ) -> None:
        self._lookup = lookup
        self._semantic = semantic
        self._replay = replay
        self._single_flight = single_flight
        self._relay = relay

    async def answer(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        """The response to a call. Raises GatewayError before the response has started, never after."""
        key, outcome = await self._lookup.find(call)
        if isinstance(outcome, Hit) and self._lookup.may_serve(call, outcome):
            return await self._repeat(request, call, key, outcome)
        inquiry = NOT_ASKED
        if not self._single_flight.under_way(call, key, outcome):
            inquiry = await self._semantic.find(call, key, outcome)
        if inquiry.hit is not None and isinstance(inquiry.reply, Found):
            if inquiry.audit and not call.directives.only_if_cached:
                self._single_flight.audit(call, key, inquiry)
            return await self._replay.answer_near(request, call, inquiry.hit, inquiry.reply)
        if landed := self._lookup.landed(call, key, outcome):
            return await self._repeat(request, call, key, landed)
        if call.directives.only_if_cached:
            raise NotCached("The answer is not in the cache, and the request says only-if-cached.")
        flight, joined = self._single_flight.join_or_lead(call, key, outcome, inquiry)
        with flight.board() as passenger:
            try:
                return await self._relay.answer(request, call, key, outcome, inquiry, passenger, joined)
            except UpstreamError:
                if stand_in := self._lookup.stand_in(call, outcome):
                    return await self._replay.answer(request, call, stand_in, "stale-if-error")
                raise

    async def _repeat(self, request: web.BaseRequest, call: Call, key: Key, hit: Hit) -> web.StreamResponse:
        """The answer that this very request has got before; where it is stale, a new one is on its way."""
        if hit.stale and not call.directives.accepts(hit):
            self._single_flight.revalidate(call, key)
        return await self._replay.answer(request, call, hit)
