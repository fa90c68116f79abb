"""The path of a request, from the parsed request to the response:

exact lookup → semantic lookup → admit → join or start a flight → route → relay and record → store

There is no await between the last check of the cache and joining a flight. A finished or running computation of the
same answer is therefore always seen, and nothing is computed twice.
"""

from aiohttp import web

from cache.entries.key import Key
from cache.entries.outcomes import Bypass, Hit, Outcome
from cache.semantic.messages import LookupHit
from gateway.errors import DeadlineExceeded, NotCached, UpstreamError
from gateway.proxy.deadlines import deadline_in
from gateway.proxy.flight import Flight
from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.lookup import REGENERATE, Lookup
from gateway.proxy.metering.accounting import Accounting
from gateway.proxy.metering.admissions import Admissions
from gateway.proxy.metering.records import describe_flight, describe_request
from gateway.proxy.relay import Relay
from gateway.proxy.replay import Replay
from gateway.proxy.semantic_lookup import NO_QUERY, SemanticLookup, SemanticQuery
from gateway.proxy.single_flight import SingleFlight
from gateway.telemetry.record import RECORD

_OK = 200


class _JoinedBroke(Exception):
    """The flight of another client broke off within its answer, of which nothing has been sent to this one."""


def _is_broken_by(flight: Flight, error: UpstreamError) -> bool:
    """Whether the flight ended with this error, and not since its time was over."""
    return error is flight.error and not isinstance(error, DeadlineExceeded)


class Pipeline:
    """Answers one inference request: each step is a line of `answer`."""

    def __init__(
        self,
        admissions: Admissions,
        accounting: Accounting,
        lookup: Lookup,
        semantic: SemanticLookup,
        replay: Replay,
        single_flight: SingleFlight,
        relay: Relay,
    ) -> None:
        self._admissions = admissions
        self._accounting = accounting
        self._lookup = lookup
        self._semantic = semantic
        self._replay = replay
        self._single_flight = single_flight
        self._relay = relay

    async def answer(self, request: web.BaseRequest, inference: InferenceRequest) -> web.StreamResponse:
        """The response to a request. Raises GatewayError only while the response has not started."""
        record = request[RECORD]
        describe_request(record, inference)
        deadline = deadline_in(inference.timeout)
        with record.span.span("cache.lookup"):
            key, outcome = await self._lookup.find(inference)
        if isinstance(outcome, Hit) and self._lookup.may_serve(inference, outcome):
            if not await self._lookup.wants_another(inference, outcome):
                return await self._serve_exact_hit(request, inference, key, outcome)
            outcome = Bypass(REGENERATE)
        query = NO_QUERY
        if not self._single_flight.in_flight(inference, key, outcome, deadline):
            with record.span.span("semantic.lookup") as span:
                query = await self._semantic.find(inference, key, outcome, span)
        if query.hit is not None and isinstance(query.reply, LookupHit):
            if query.audit and not inference.cache_control.only_if_cached:
                self._single_flight.audit(inference, key, query)
            await self._admissions.hit(inference.caller)
            return await self._replay.answer_similar(request, inference, query.hit, query.reply)
        if inference.cache_control.only_if_cached:
            if finished := self._lookup.finished(inference, key, outcome):
                return await self._serve_exact_hit(request, inference, key, finished)
            raise NotCached("The answer is not in the cache, and the request says only-if-cached.")
        try:
            return await self._answer_miss(request, inference, key, outcome, query, deadline)
        except _JoinedBroke:
            return await self._answer_miss(request, inference, key, outcome, query, deadline, is_again=True)

    async def _answer_miss(
        self,
        request: web.BaseRequest,
        inference: InferenceRequest,
        key: Key,
        outcome: Outcome,
        query: SemanticQuery,
        deadline: float | None,
        *,
        is_again: bool = False,
    ) -> web.StreamResponse:
        """The response to what is not stored. Raises _JoinedBroke once, if another flight may still answer."""
        record = request[RECORD]
        async with self._admissions.miss(inference, record.span) as admission:
            if finished := self._lookup.finished(inference, key, outcome):
                admission.settle(0, 0)
                return await self._replay.answer(request, inference, finished)
            flight, joined = self._single_flight.join_or_start(inference, key, outcome, query, admission, deadline)
            with flight.subscribe(deadline if joined else None) as subscriber:
                asks_again = False
                try:
                    return await self._relay.answer(
                        request, inference, key, outcome, query, subscriber, joined, admission.headers
                    )
                except UpstreamError as error:
                    if stale_if_error_hit := self._lookup.stale_if_error_hit(inference, outcome):
                        return await self._replay.answer(request, inference, stale_if_error_hit, "stale-if-error")
                    if joined and not is_again and flight.status == _OK and _is_broken_by(flight, error):
                        asks_again = True
                        raise _JoinedBroke from error
                    raise
                finally:
                    if joined:
                        record.span.link(flight.span)
                    if not asks_again:
                        if joined:
                            self._accounting.joined(inference, flight)
                        describe_flight(record, flight, joined)

    async def _serve_exact_hit(
        self, request: web.BaseRequest, inference: InferenceRequest, key: Key, hit: Hit
    ) -> web.StreamResponse:
        """Serve an exact hit. A stale one is revalidated in the background (RFC 5861, section 3), one to audit too."""
        await self._admissions.hit(inference.caller)
        is_outdated = hit.stale and not inference.cache_control.accepts(hit)
        if is_outdated or (self._semantic.audits(inference) and not inference.cache_control.only_if_cached):
            self._single_flight.revalidate(inference, key, hit)
        return await self._replay.answer(request, inference, hit)
