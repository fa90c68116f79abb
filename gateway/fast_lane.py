"""Hot answers, before any routing: a request seen before, byte for byte, is answered from memory.

It does nothing that the pipeline does not do; it only remembers where the pipeline arrived. The memory tier maps the
digest of body, path and tenant, for which other headers do not matter, to the entry and the form that answered; and
the digest of all the bytes of a request leads to that digest, so that not even the headers need to be read the next
time (see HotConnection).
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import xxhash
from aiohttp import web

from cache.exact import ExactCache
from cache.memory import Slot
from gateway.body import read_body
from gateway.call import FAMILIES, credential
from gateway.errors import GatewayError
from gateway.hot_connection import is_plain, take_over
from gateway.metrics import HitCounter
from gateway.replies import ReadyResponse, hit_headers, whole_response
from gateway.settings import Settings

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

RAW_DIGEST = "keepgate.raw_digest"

# About a megabyte. A client that sends a new header with every request fills it, the least recently used go first.
_MOST_WIRE_DIGESTS = 4096


class FastLane:
    """Stands in front of the application's own request handler."""

    def __init__(self, application: Handler, cache: ExactCache, settings: Settings) -> None:
        self._application = application
        self._cache = cache
        self._namespace = settings.cache.namespace
        self._max_body = settings.max_body
        self._patience = settings.timeouts.client
        # Unknown to clients, so that nobody can build two requests with one digest; two seeds keep the two kinds of
        # digest apart.
        self._seed = secrets.randbits(64)
        self._wire_seed = secrets.randbits(64)
        self._wire_digests: OrderedDict[bytes, bytes] = OrderedDict()
        self._counters = {family: HitCounter(family) for family in FAMILIES.values()}

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        wire = take_over(request, self.answer_to)
        path = request.path
        said = request.headers
        # A client that says Expect sends no body before the application has told it to.
        if path not in FAMILIES or request.method != "POST" or "Cache-Control" in said or "Expect" in said:
            return await self._application(request)
        try:
            body = await read_body(request, self._max_body, self._patience)
        except GatewayError as error:
            return error.response()
        tenant = credential(request.headers, self._namespace)
        raw = b"\0".join((*(text.encode("utf-8", "surrogateescape") for text in (request.raw_path, tenant)), body))
        digest = xxhash.xxh3_128_digest(raw, self._seed)
        if (found := self._find(digest)) is None:
            request[RAW_DIGEST] = digest
            return await self._application(request)
        slot, form, age = found
        headers, answer = hit_headers(slot.entry, age, form, "exact"), slot.forms[form]
        if not is_plain(request):
            return web.Response(body=answer, headers=headers)
        if wire is not None:
            self._remember(wire, digest)
        if not _has_sent_all(request):
            return web.Response(body=answer, headers=headers)
        return ReadyResponse(whole_response(headers, answer))

    def answer_to(self, wire: bytes) -> bytes | None:
        """The whole response, head and body, to a request of exactly these bytes, where it is known."""
        wire_digest = xxhash.xxh3_128_digest(wire, self._wire_seed)
        digest = self._wire_digests.get(wire_digest)
        if digest is None or (found := self._find(digest)) is None:
            return None
        self._wire_digests.move_to_end(wire_digest)
        slot, form, age = found
        return whole_response(hit_headers(slot.entry, age, form, "exact"), slot.forms[form])

    def _remember(self, wire: bytes, digest: bytes) -> None:
        self._wire_digests[xxhash.xxh3_128_digest(wire, self._wire_seed)] = digest
        if len(self._wire_digests) > _MOST_WIRE_DIGESTS:
            self._wire_digests.popitem(last=False)

    def _find(self, digest: bytes) -> tuple[Slot, str, float] | None:
        """The slot that answers now, in which form, and its age in seconds; counted as a hit."""
        found = self._cache.memory.by_alias(digest)
        if found is None:
            return None
        slot, form = found
        entry = slot.entry
        age = entry.age(time.time())
        if age >= entry.fresh_for or not self._cache.counts(entry):
            return None
        self._counters[entry.family].count_from_memory(entry)
        return slot, form, age


def _has_sent_all(request: web.BaseRequest) -> bool:
    """Whether the client has taken the answers before this one; if not, aiohttp waits for it."""
    return request.transport is not None and request.transport.get_write_buffer_size() == 0
