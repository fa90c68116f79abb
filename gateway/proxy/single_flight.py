"""Identical requests in flight share one upstream call, whose whole answer is stored."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from cache.entries.entry import Entry
from cache.entries.key import Key
from cache.entries.outcomes import Bypass, Hit, Outcome
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from gateway import metrics
from gateway.http.cache_control import parse_cache_control
from gateway.proxy.flight import Flight, FlightTable
from gateway.proxy.inference_request import USAGE_OF_STREAMS, InferenceRequest
from gateway.proxy.lookup import ASKING_FOR_NEW
from gateway.proxy.metering.accounting import Accounting
from gateway.proxy.predictions.attempts import with_prediction
from gateway.proxy.predictions.drafts import Drafts
from gateway.proxy.prompt_caches.planner import PromptCachePlanner
from gateway.proxy.recorder import Recording
from gateway.proxy.semantic_lookup import SemanticLookup, SemanticQuery
from gateway.routing.call import RouteCall
from gateway.routing.prefixes.asking import Prompt
from gateway.routing.prefixes.prompt_blocks import prompt_blocks
from gateway.routing.prefixes.views import PrefixViews
from gateway.routing.router import Router
from gateway.routing.strategy import UNKNOWN
from gateway.routing.table import RoutingTable
from gateway.settings.cache import CacheSettings
from gateway.surfaces.surface import TranslatedForm
from gateway.surfaces.whole import WholeEndpoint
from gateway.telemetry.record import REQUEST_ID_HEADER, current_record
from gateway.telemetry.tracing import call_attributes, operation_of, server_attributes, usage_attributes
from gateway.tenants.admission import UNLIMITED, Admission
from gateway.tenants.credentials import NAMESPACE_HEADER
from gateway.tenants.policies import writes_cache
from gateway.upstreams.upstream import PREDICTION, REUSE_HEADER, UpstreamResponse
from telemetry.tracing.timed import untimed


class SingleFlight:
    """Starts flights, each under the name of its answer, and stores their answers."""

    def __init__(
        self,
        cache: ExactCache,
        semantic: SemanticLookup,
        flights: FlightTable,
        router: Router,
        settings: CacheSettings,
        prompt_caches: PromptCachePlanner | None,
        drafts: Drafts | None,
        routing: RoutingTable,
        views: PrefixViews,
        accounting: Accounting,
    ) -> None:
        """Without `prompt_caches` no request is marked, and without `drafts` none has a prediction."""
        self._table = routing
        self._views = views
        self._accounting = accounting
        self._cache = cache
        self._semantic = semantic
        self._flights = flights
        self._router = router
        self._settings = settings
        self._prompt_caches = prompt_caches
        self._drafts = drafts

    def in_flight(
        self, inference: InferenceRequest, key: Key, outcome: Outcome, deadline: float | None
    ) -> Flight | None:
        """The running flight with the answer to this request, if the request may wait for one until its deadline."""
        if isinstance(outcome, Bypass) or inference.cache_control.only_if_cached:
            return None
        with_usage, without_usage = _flight_keys(inference, key)
        names = (with_usage,) if inference.needs_usage else (with_usage, without_usage)
        return self._find(names, inference, key, deadline)

    def _find(
        self, names: tuple[str, ...], inference: InferenceRequest, key: Key, deadline: float | None = None
    ) -> Flight | None:
        """A running flight of one of these names that began after the last purge of its answer."""
        flight = self._flights.find(names, deadline)
        if flight is None or flight.generation != self._cache.generation(key.namespace, inference.model):
            return None
        # Whether what this request alone calls the answer was purged since the flight began is not known.
        is_named = flight.purges == self._cache.purges or set(inference.tags) <= {tag.name for tag in flight.tags}
        return flight if is_named and self._cache.are_current(flight.tags) else None

    def join_or_start(
        self,
        inference: InferenceRequest,
        key: Key,
        outcome: Outcome,
        query: SemanticQuery,
        admission: Admission,
        deadline: float | None,
    ) -> tuple[Flight, bool]:
        """A flight with the answer to this request, and whether it was running already.

        `deadline` is that of the request, a time of the event loop. `admission` is settled by what the flight uses; who
        joins uses nothing.
        """
        if isinstance(outcome, Bypass):
            # A bypass shares no flight; the answer to a request for a new one is stored all the same.
            keeps = outcome.reason in ASKING_FOR_NEW
            return self._start_flight(inference, key, None, outcome, query, admission, deadline, keeps=keeps), False
        if flight := self.in_flight(inference, key, outcome, deadline):
            known = {tag.name for tag in flight.tags}
            flight.tags += self._cache.tagged(name for name in inference.tags if name not in known)
            metrics.collapsed.inc()
            admission.settle(0, 0)
            return flight, True
        with_usage, without_usage = _flight_keys(inference, key)
        # A stream whose upstream is not asked for usage may carry none: it does not serve requests that ask for it.
        is_asked = inference.include_usage or (self._settings.ask_usage and self._router.none_lacks(USAGE_OF_STREAMS))
        may_lack_usage = inference.stream and not is_asked
        name = without_usage if may_lack_usage else with_usage
        return self._start_flight(inference, key, name, outcome, query, admission, deadline), False

    def revalidate(self, inference: InferenceRequest, key: Key, stale: Hit) -> None:
        """Compute the answer again in the background, unless a flight is computing it. It keeps the entry's tags."""
        names = _flight_keys(inference, key)
        inference = replace(
            inference, tags=(*dict.fromkeys((*inference.tags, *(tag.name for tag in stale.entry.tags))),)
        )
        if not self._find(names, inference, key):
            query = self._semantic.unsent_query(inference)
            self._start_flight(inference, key, names[1], stale, query).background = True

    def audit(self, inference: InferenceRequest, key: Key, query: SemanticQuery) -> None:
        """Compute in the background the answer that a semantic hit replaced, to compare the two.

        Once, however many requests share the query.
        """
        query.audit = False
        names = _flight_keys(inference, key)
        if query.hit is not None and not self._find(names, inference, key):
            metrics.semantic_audits.inc()
            self._start_flight(inference, key, names[1], query.hit, query).background = True

    def _start_flight(
        self,
        inference: InferenceRequest,
        key: Key,
        name: str | None,
        outcome: Outcome,
        query: SemanticQuery,
        admission: Admission = UNLIMITED,
        deadline: float | None = None,
        *,
        keeps: bool = True,
    ) -> Flight:
        flight = Flight(
            self._settings.max_answer,
            inference.choices,
            inference.needs_usage,
            deadline,
            self._cache.generation(key.namespace, inference.model),
            self._cache.tagged(inference.tags),
            self._cache.purges,
        )
        self._flights.start(flight, self._compute(inference, key, flight, outcome, query, admission, keeps), name)
        return flight

    def _own_headers(self, inference: InferenceRequest, flight: Flight) -> Mapping[str, str]:
        """The gateway's own request headers, beside the client's. The flight's span begins."""
        own = {REUSE_HEADER: inference.reuse, **inference.caller.own}
        if (record := current_record()) is not None:
            own[REQUEST_ID_HEADER] = record.request_id
            if record.span.is_recorded:
                attributes = call_attributes(inference.family, inference.model, stream=inference.stream)
                # What a background flight takes is no part of the client's own time.
                span = untimed(record.span) if flight.background else record.span
                flight.span = span.span(f"{operation_of(inference.family)} {inference.model}", attributes, "client")
            own |= flight.span.headers() or record.span.headers()
        return own

    async def _prefix(self, inference: InferenceRequest, key: Key) -> "_Prefix":
        """What the routing of this model wants to know of the prompt."""
        if self._table.name_of(inference.model) != "prefix-aware" or len(self._router.upstreams) < 2:
            return _NO_PREFIX
        fields = (
            inference.asked.chat_fields if isinstance(inference.surface, TranslatedForm) else inference.asked.fields
        )
        own = {**inference.caller.own, NAMESPACE_HEADER: key.namespace}
        held = await self._views.held(self._router.having(inference.model), Prompt(fields, inference.headers, own))
        return _Prefix(prompt_blocks(key.namespace, fields), held)

    async def _compute(
        self,
        inference: InferenceRequest,
        key: Key,
        flight: Flight,
        outcome: Outcome,
        query: SemanticQuery,
        admission: Admission,
        keeps: bool,
    ) -> None:
        own = self._own_headers(inference, flight)

        async def request() -> UpstreamResponse:
            attempts = inference.attempts(self._settings.ask_usage)
            if self._prompt_caches is not None:
                attempts = self._prompt_caches.marked(attempts, key.namespace, inference.model)
            draft = None
            if self._drafts is not None and self._drafts.are_taken(inference):
                with flight.span.span("cache.draft"):
                    draft = await self._drafts.find(inference, key, outcome, query)
            if draft is not None:
                attempts = with_prediction(attempts, draft.text)
            with flight.span.span("route.prefix"):
                prefix = await self._prefix(inference, key)
            call = RouteCall(
                method="POST",
                headers=inference.headers,
                attempts=attempts,
                model=inference.model,
                otherwise=inference.asked.untranslatable,
                own=own,
                namespace=key.namespace,
                blocks=prefix.blocks,
                held=prefix.held,
                priority=inference.priority,
                deadline=flight.deadline,
                fallbacks=[
                    (model, inference.for_model(model).attempts(self._settings.ask_usage))
                    for model in inference.fallbacks
                ],
            )
            answer = await self._router.request(call)
            if draft is not None and answer.attempt is not None and PREDICTION in answer.attempt.marks:
                flight.prediction = draft.source
            return answer

        try:
            await flight.run(request())  # whose faults are the flight's
        finally:
            flight.charge = self._accounting.computed(inference, flight)
            _end_span(flight)
            admission.settle(*self._accounting.used(inference, flight))
        _count(flight)
        if flight.recording is None or not keeps or not writes_cache(inference.caller):
            return
        if flight.model not in (None, inference.model):
            metrics.not_stored.labels("a fallback answered").inc()
            return
        if parse_cache_control(", ".join(flight.headers.getall("Cache-Control", ()))).no_store:
            metrics.not_stored.labels("upstream says no-store").inc()
            return
        entry = self._entry(inference, key, flight, flight.recording)
        try:
            with flight.span.span("cache.store"):
                await self._cache.store(entry)
            metrics.stored.inc()
        except StoreUnavailable:
            metrics.store_failures.labels("redis").inc()
            return
        if self._cache.counts(entry):
            await self._semantic.record(inference, query, entry)

    def _entry(self, inference: InferenceRequest, key: Key, flight: Flight, recording: Recording) -> Entry:
        prompt_tokens, completion_tokens = recording.usage or (0, 0)
        charge = None if flight.charge is None or flight.charge.estimated else flight.charge
        return Entry(
            id=key.id,
            proof=key.proof,
            family=flight.form.family,
            model=inference.model,
            body=recording.body,
            created=time.time(),
            fresh_for=self._settings.ttl,
            generation=flight.generation,
            has_usage=recording.usage is not None,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            seconds=flight.seconds,
            content_type=flight.content_type if isinstance(flight.form, WholeEndpoint) else "",
            cost=None if charge is None else charge.cost,
            repeat_cost=None if charge is None else charge.repeat_cost,
            cached_tokens=0 if charge is None else charge.cached_tokens,
            written_tokens=0 if charge is None else charge.written_tokens,
            upstream=flight.source.name if flight.source is not None else "",
            asked=inference.fingerprint,
            tags=flight.tags,
        )


class _Prefix(NamedTuple):
    """Of a prompt: its blocks, and what upstreams say that they hold of it."""

    blocks: tuple[int, ...] = ()
    held: Mapping[str, float] = UNKNOWN


_NO_PREFIX = _Prefix()


def _flight_keys(inference: InferenceRequest, key: Key) -> tuple[str, str]:
    """The names of a flight for this request: of one that certainly carries usage, and of one that may not.

    The priority is part of the name: an urgent request does not wait for a flight of lower priority, and an upstream
    that does not support priorities refuses only requests that have one.
    """
    name = f"{key.id} at {inference.priority}"
    return f"{name} with usage", f"{name} without usage"


def _end_span(flight: Flight) -> None:
    span, source = flight.span, flight.source
    if not span.is_recorded:
        return
    if source is not None:
        span.set({**server_attributes(source.url), "http.response.status_code": flight.status})
    if flight.charge is not None and not flight.charge.estimated:
        charge = flight.charge
        span.set(usage_attributes(charge.prompt_tokens, charge.completion_tokens, charge.cached_tokens))
    if flight.error is not None and not flight.abandoned:
        span.fail(flight.error.label)
    span.end()


def _count(flight: Flight) -> None:
    if flight.status:
        metrics.upstream_first_byte_seconds.observe(flight.first_byte_seconds)
    if flight.recording is not None:
        metrics.upstream_seconds.observe(flight.seconds)
        prompt_tokens, completion_tokens = flight.recording.usage or (0, 0)
        metrics.upstream_tokens.labels("prompt").inc(prompt_tokens)
        metrics.upstream_tokens.labels("completion").inc(completion_tokens)
        if flight.prediction:
            metrics.predictions.labels(flight.prediction).inc()
            for outcome, tokens in flight.prediction_tokens._asdict().items():
                metrics.prediction_tokens.labels(flight.prediction, outcome).inc(tokens)
        if flight.recording.prompt_cache is not None:
            read, written = flight.recording.prompt_cache
            metrics.upstream_prompt_tokens.labels(flight.upstream).inc(prompt_tokens)
            metrics.upstream_cached_prompt_tokens.labels(flight.upstream).inc(read)
            metrics.upstream_cache_write_prompt_tokens.labels(flight.upstream).inc(written)
    elif flight.status == 200:
        metrics.not_stored.labels("not whole").inc()
