"""Identical requests in flight share one upstream call, whose whole answer is stored."""

import time
from collections.abc import Mapping

from cache.entries.entry import Entry
from cache.entries.key import Key
from cache.entries.outcomes import Bypass, Outcome
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from gateway import metrics
from gateway.http.cache_control import parse_cache_control
from gateway.proxy.call import Call, namespace_header
from gateway.proxy.flight import Flight, FlightTable
from gateway.proxy.recorder import Recording
from gateway.proxy.semantic_lookup import Inquiry, Semantic
from gateway.settings.settings import CacheSettings
from gateway.upstreams.router import Router
from gateway.upstreams.upstream import REUSE_HEADER, USAGE_HEADER


class SingleFlight:
    """Launches flights, each under the name of what it carries, and stores what they bring."""

    def __init__(
        self, cache: ExactCache, semantic: Semantic, flights: FlightTable, router: Router, settings: CacheSettings
    ) -> None:
        self._cache = cache
        self._semantic = semantic
        self._flights = flights
        self._router = router
        self._settings = settings

    def under_way(self, call: Call, key: Key, outcome: Outcome) -> Flight | None:
        """The flight that carries the answer to this call, for those who wait for one."""
        if isinstance(outcome, Bypass) or call.directives.only_if_cached:
            return None
        with_usage, without_usage = _names(call, key)
        return self._flights.find((with_usage,) if call.needs_usage else (with_usage, without_usage))

    def join_or_lead(self, call: Call, key: Key, outcome: Outcome, inquiry: Inquiry) -> tuple[Flight, bool]:
        """A flight that carries the answer to this call, and whether it was under way already."""
        if isinstance(outcome, Bypass):
            # Nobody else's answer will do; one that was only to be fresh is still worth keeping.
            return self._launch(call, key, None, inquiry, keeps=outcome.reason == "no-cache"), False
        if flight := self.under_way(call, key, outcome):
            metrics.collapsed.inc()
            return flight, True
        with_usage, without_usage = _names(call, key)
        # A stream that was not asked for usage may bring none: it does not serve those who did ask.
        may_lack_usage = call.stream and not call.include_usage
        return self._launch(call, key, without_usage if may_lack_usage else with_usage, inquiry), False

    def revalidate(self, call: Call, key: Key) -> None:
        """Compute the answer again with nobody waiting for it, unless that is being done."""
        names = _names(call, key)
        if not self._flights.find(names):
            self._launch(call, key, names[1], self._semantic.unasked(call)).background = True

    def audit(self, call: Call, key: Key, inquiry: Inquiry) -> None:
        """Compute the answer that was not asked for because another was served, to compare the two.

        Once, however many share the inquiry.
        """
        inquiry.audit = False
        names = _names(call, key)
        if not self._flights.find(names):
            metrics.semantic_audits.inc()
            self._launch(call, key, names[1], inquiry).background = True

    def _launch(self, call: Call, key: Key, name: str | None, inquiry: Inquiry, keeps: bool = True) -> Flight:
        flight = Flight(self._settings.max_answer, call.choices)
        self._flights.launch(flight, self._compute(call, key, flight, inquiry, keeps), name)
        return flight

    def _own_headers(self, call: Call) -> Mapping[str, str]:
        """What the upstream has to know besides what the client says."""
        own = {REUSE_HEADER: call.reuse, **namespace_header(call.headers, self._settings.namespace)}
        if call.stream and not call.include_usage:
            own[USAGE_HEADER] = "always"
        return own

    async def _compute(self, call: Call, key: Key, flight: Flight, inquiry: Inquiry, keeps: bool) -> None:
        generation = self._cache.generation(key.namespace, call.model)
        own = self._own_headers(call)
        await flight.fly(self._router.request("POST", call.path, call.headers, call.body, call.model, own))
        _count(flight)
        if flight.recording is None or not keeps:
            return
        if parse_cache_control(", ".join(flight.headers.getall("Cache-Control", ()))).no_store:
            metrics.not_stored.labels("upstream says no-store").inc()
            return
        entry = self._entry(call, key, flight, flight.recording, generation)
        try:
            await self._cache.store(entry)
            metrics.stored.inc()
        except StoreUnavailable:
            metrics.store_failures.labels("redis").inc()
            return
        if self._cache.counts(entry):
            await self._semantic.answered(call, inquiry, entry)

    def _entry(self, call: Call, key: Key, flight: Flight, recording: Recording, generation: str) -> Entry:
        prompt_tokens, completion_tokens = recording.usage or (0, 0)
        return Entry(
            id=key.id,
            proof=key.proof,
            family=call.family,
            model=call.model,
            body=recording.body,
            created=time.time(),
            fresh_for=self._settings.ttl,
            generation=generation,
            has_usage=recording.usage is not None,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            seconds=flight.seconds,
        )


def _names(call: Call, key: Key) -> tuple[str, str]:
    """What a flight for this call is called, if it brings usage for certain and if it may not.

    The answer is the same at any priority, but the flight is not: who is in a hurry does not wait for one that is
    not, and an upstream that knows no priorities refuses only those who have one.
    """
    name = f"{key.id} at {call.priority}"
    return f"{name} with usage", f"{name} without usage"


def _count(flight: Flight) -> None:
    if flight.status:
        metrics.upstream_first_byte_seconds.observe(flight.first_byte_seconds)
    if flight.recording is not None:
        metrics.upstream_seconds.observe(flight.seconds)
        prompt_tokens, completion_tokens = flight.recording.usage or (0, 0)
        metrics.upstream_tokens.labels("prompt").inc(prompt_tokens)
        metrics.upstream_tokens.labels("completion").inc(completion_tokens)
        if flight.recording.prefix_tokens is not None:
            metrics.prompt_tokens.labels(flight.upstream).inc(prompt_tokens)
            metrics.prefix_tokens.labels(flight.upstream).inc(flight.recording.prefix_tokens)
    elif flight.status == 200:
        metrics.not_stored.labels("not whole").inc()
