"""Exact hits before routing: a request with the same bytes as an earlier one is answered from memory.

The result is the pipeline's own: the memory tier maps the digest of body, path and tenant to the entry and the form
with which the pipeline answered. Other headers than those of the tenant's text do not change that answer.
"""

import asyncio
import secrets
import time

import xxhash
from aiohttp import web
from aiohttp.hdrs import CACHE_CONTROL, EXPECT, ORIGIN
from multidict import CIMultiDictProxy, istr

from cache.entries.entry import Entry
from cache.exact import ExactCache
from cache.stores.memory import Slot
from gateway import metrics
from gateway.errors import GatewayError
from gateway.http.body import read_body
from gateway.http.cache_control import tags_of
from gateway.http.server import Handler
from gateway.proxy.inference_request import MAX_RISK_HEADER, THRESHOLD_HEADER
from gateway.proxy.metering.accounting import Accounting
from gateway.proxy.metering.records import describe_caller, describe_hit
from gateway.proxy.response_headers import HitResponses
from gateway.settings.settings import Settings
from gateway.surfaces.registry import BY_PATH, error_response
from gateway.surfaces.surface import AnswerForm
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.request_log import RequestLog
from gateway.tenants.caller import CALLER, Caller
from gateway.tenants.callers import Callers
from gateway.tenants.credentials import answer_headers
from gateway.tenants.limiter import Limiter
from gateway.tenants.policies import allows_model, reads_cache
from gateway.upstreams.upstream import REUSE_HEADER
from telemetry.tracing.timed import timings_of

# What nginx logs for a client that has left.
_CLIENT_CLOSED = 499
# Looked up twice as fast as plain strings.
_MAX_RISK, _REUSE, _THRESHOLD = istr(MAX_RISK_HEADER), istr(REUSE_HEADER), istr(THRESHOLD_HEADER)
RAW_DIGEST = web.RequestKey("raw_digest", bytes)


class FastPath:
    """Stands in front of the application's own request handler."""

    def __init__(
        self,
        application: Handler,
        cache: ExactCache,
        callers: Callers,
        limiter: Limiter,
        settings: Settings,
        accounting: Accounting,
        requests: RequestLog,
    ) -> None:
        self._application = application
        self._requests = requests
        self._hits = HitResponses()
        self._cache = cache
        self._callers = callers
        self._limiter = limiter
        rules = [rule for model in settings.routing.models.values() for rule in model.rules]
        asked = [rule.header.partition(":")[0] for rule in rules if rule.header is not None]
        # What a rule asks of a request beside its body may change its answer too.
        self._key_headers = (*settings.cache.key_headers, *asked)
        self._tells_keys = any(rule.teams or rule.keys for rule in rules)
        self._max_body = settings.max_body
        self._has_origins = bool(settings.cors_origins)
        self._timeout = settings.timeouts.client
        # Secret, so that no client can construct two requests with one digest.
        self._seed = secrets.randbits(64)
        self._accounting = accounting

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """The response to any request, which is told of when it has ended."""
        surface = BY_PATH.get(request.path)
        record = self._requests.begin(request)
        try:
            response = await self._answer(request, surface, record)
            record.status = response.status
            return response
        except asyncio.CancelledError:
            record.status = _CLIENT_CLOSED
            raise
        finally:
            if record.span.is_recorded:
                record.route = request.path if surface is not None else _route(request)
            self._requests.finish(record)

    async def _answer(
        self, request: web.BaseRequest, surface: AnswerForm | None, record: RequestRecord
    ) -> web.StreamResponse:
        if (
            surface is None
            or request.method != "POST"
            or timings_of(record.span) is not None
            or self._has_directives(request.headers)
        ):
            return await self._application(request)
        caller = self._callers.known(request.headers)
        if caller is None:
            return await self._application(request)
        request[CALLER] = caller
        try:
            tags_of(request.headers)  # an answer that is stored keeps its own
            body = await read_body(request, self._max_body, self._timeout)
        except GatewayError as error:
            metrics.errors.labels(error.label).inc()
            record.error = error.label
            return error_response(surface, error)
        tenant = caller.credential + answer_headers(request.headers, self._key_headers)
        if self._tells_keys and caller.key is not None:
            tenant += f"\nkey: {caller.key.id} {caller.key.name}"
        text = f"{request.raw_path}\0{tenant}\0".encode("utf-8", "surrogateescape")
        digest = xxhash.xxh3_128_digest(text + body, self._seed)
        if (found := self._find(digest, caller)) is None:
            request[RAW_DIGEST] = digest
            return await self._application(request)
        slot, form, now = found
        self._accounting.hit_from_memory(surface.family, slot.entry, caller)
        describe_hit(record, slot.entry, surface.family, "exact", slot.entry.repeat_cost)
        describe_caller(record, caller)
        return self._hits.response(request, record.request_id, slot.entry, now, form, slot.forms[form])

    def _find(self, digest: bytes, caller: Caller) -> tuple[Slot, str, float] | None:
        """The slot that answers this caller now, in which form, and the time in Unix seconds."""
        found = self._cache.memory.by_alias(digest)
        if found is None:
            return None
        slot, form = found
        entry, now = slot.entry, time.time()
        if entry.age(now) >= entry.fresh_for or not self._cache.counts(entry):
            return None
        if caller.key is not None and not self._may_serve(caller, entry):
            return None
        return slot, form, now

    def _may_serve(self, caller: Caller, entry: Entry) -> bool:
        """Whether the pipeline would serve it without a wait. It tells the caller of a refusal."""
        return allows_model(caller, entry.model) and reads_cache(caller) and self._limiter.take_hit(caller) is True

    def _has_directives(self, given: CIMultiDictProxy[str]) -> bool:
        """Whether the pipeline has to read the headers. A client that sends Expect waits for the application's 100
        before it sends the body; a page of another origin gets further headers.
        """
        return (
            CACHE_CONTROL in given
            or EXPECT in given
            or _MAX_RISK in given
            or _REUSE in given
            or _THRESHOLD in given
            or (self._has_origins and ORIGIN in given)
        )


def _route(request: web.BaseRequest) -> str:
    """The pattern of the path of a request that the application has answered; "" if it has none."""
    resource = request.match_info.route.resource if isinstance(request, web.Request) else None
    return "" if resource is None else resource.canonical
