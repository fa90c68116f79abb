"""Hot answers, before any routing: a request seen before, byte for byte, is answered from memory.

It does nothing that the pipeline does not do; it only remembers where the pipeline arrived. The memory tier maps the
bytes of a request (with its tenant) to the entry and the form that answered it; whatever is not that plain goes on.
"""

import secrets
import time
from collections.abc import Awaitable, Callable

import xxhash
from aiohttp import web

from cache.exact import ExactCache
from cache.memory import Slot
from gateway.body import read_body
from gateway.call import FAMILIES, credential
from gateway.errors import GatewayError
from gateway.metrics import HitCounter
from gateway.replies import hit_headers
from gateway.settings import Settings

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

RAW_DIGEST = "keepgate.raw_digest"


class FastLane:
    """Stands in front of the application's own request handler."""

    def __init__(self, application: Handler, cache: ExactCache, settings: Settings) -> None:
        self._application = application
        self._cache = cache
        self._namespace = settings.cache.namespace
        self._max_body = settings.max_body
        self._patience = settings.timeouts.client
        # Unknown to clients, so that nobody can build two requests with one digest.
        self._seed = secrets.randbits(64)
        self._counters = {family: HitCounter(family) for family in FAMILIES.values()}

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path not in FAMILIES or request.method != "POST" or "Cache-Control" in request.headers:
            return await self._application(request)
        try:
            body = await read_body(request, self._max_body, self._patience)
        except GatewayError as error:
            return error.response()
        tenant = credential(request.headers, self._namespace)
        raw = b"\0".join((path.encode(), tenant.encode("utf-8", "surrogateescape"), body))
        digest = xxhash.xxh3_128_digest(raw, self._seed)
        found = self._cache.memory.by_alias(digest)
        if found is not None and (response := self._answer(*found)) is not None:
            return response
        request[RAW_DIGEST] = digest
        return await self._application(request)

    def _answer(self, slot: Slot, form: str) -> web.Response | None:
        entry = slot.entry
        age = entry.age(time.time())
        if age >= entry.fresh_for or not self._cache.counts(entry):
            return None
        self._counters[entry.family].count_from_memory(entry)
        return web.Response(body=slot.forms[form], headers=hit_headers(entry, age, form, "exact"))
