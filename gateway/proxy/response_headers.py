"""The response headers that tell how the cache took part: Age (RFC 9111), Cache-Status (RFC 9211), x-keepgate-*.

A header of a hit is added in `hit_headers`, one of a forwarded request in `forwarded_headers`.
"""

import functools
import time
from collections.abc import Mapping, MutableMapping
from email.utils import formatdate

from aiohttp import HttpVersion11, web
from aiohttp.hdrs import ORIGIN
from aiohttp.http import SERVER_SOFTWARE
from multidict import CIMultiDict

from cache.entries.entry import Entry
from cache.entries.outcomes import Bypass, Failed, Hit, Outcome
from cache.semantic.messages import LookupMiss, LookupReply
from gateway.costs.cost import money
from gateway.costs.pricing import Charge
from gateway.proxy.lookup import ASKING_FOR_NEW
from gateway.surfaces.registry import BY_FAMILY
from gateway.telemetry.record import RECORD, REQUEST_ID_HEADER, name_response

IGNORED_HEADER = "x-keepgate-ignored-fields"
"""Names the fields of a request that had no meaning for what answered it."""
MODEL_HEADER = "x-keepgate-model"
"""The model that has answered, where the client named another one."""
COST_HEADER = "x-keepgate-cost"
SAVING_HEADER = "x-keepgate-saving"
"""In US dollars: what the request cost, and what it would have cost without the cache."""
COST_HEADERS = f"{COST_HEADER}, {SAVING_HEADER}"
_JSON = "application/json"
_money = functools.lru_cache(maxsize=4096)(money)
_SERVER = f"Server: {SERVER_SOFTWARE}"
_REQUEST_ID = REQUEST_ID_HEADER.encode()
_MOST_HEADS = 1_000


@functools.lru_cache(maxsize=1024)
def content_type(form: str) -> str:
    """The content type of `InferenceRequest.form`."""
    family, _, kind = form.partition(" ")
    return BY_FAMILY[family].stream_type if kind.startswith("stream") else _JSON


def hit_headers(
    entry: Entry, age: float, form: str, detail: str, layer: str = "exact", saving: float | None = None
) -> dict[str, str]:
    """For an answer from the cache; `age` in seconds, `saving` in dollars where it is not what the entry would have
    cost again.
    """
    kind = entry.content_type or content_type(form)
    headers = {
        "Content-Type": kind,
        "Age": str(int(age)),
        "Cache-Status": f"keepgate; hit; ttl={int(entry.fresh_for - age)}; detail={detail}",
        "x-keepgate-cache": "hit",
        "x-keepgate-layer": layer,
        "x-keepgate-entry": entry.id,
    }
    if not entry.content_type and kind is not _JSON:
        headers["Cache-Control"] = "no-cache"  # for proxies between: they must not store a stream
    if entry.repeat_cost is not None:
        headers[COST_HEADER] = "0"
        headers[SAVING_HEADER] = _money(entry.repeat_cost if saving is None else saving)
    return headers


def whole_response(request: web.BaseRequest, headers: MutableMapping[str, str], body: bytes) -> web.StreamResponse:
    """Status 200 with these headers and this body."""
    if _is_plain(request):
        if (record := request.get(RECORD)) is not None:
            name_response(headers, record)
        return _ReadyResponse(_head(headers, len(body)) + b"\r\n" + body)
    return web.Response(body=body, headers=headers)


class HitResponses:
    """Responses with answers from memory. The heads of those of one answer differ by the second alone."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, float, str], tuple[int, bytes]] = {}

    def response(
        self, request: web.BaseRequest, request_id: str, entry: Entry, now: float, form: str, body: bytes
    ) -> web.StreamResponse:
        """The entry's answer in this form, at the time `now` in Unix seconds."""
        if not _is_plain(request):
            return whole_response(request, hit_headers(entry, entry.age(now), form, "exact"), body)
        name, second = (entry.id, entry.created, form), int(now)
        known = self._heads.get(name)
        if known is None or known[0] != second:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            known = self._heads[name] = second, _head(hit_headers(entry, entry.age(now), form, "exact"), len(body))
        return _ReadyResponse(b"%b%b: %b\r\n\r\n%b" % (known[1], _REQUEST_ID, request_id.encode(), body))


def _is_plain(request: web.BaseRequest) -> bool:
    """Whether the whole response can be written at once on a connection that is kept open, with no further headers."""
    return (
        request.version == HttpVersion11
        and ORIGIN not in request.headers
        and request.keep_alive
        and request.transport is not None
        and request.transport.get_write_buffer_size() == 0
    )


@functools.lru_cache(maxsize=1)
def _date(now: int) -> str:
    """Unix seconds as an HTTP date (RFC 9110, section 5.6.7)."""
    return formatdate(now, usegmt=True)


def _head(headers: Mapping[str, str], length: int) -> bytes:
    """The head of a response but for the empty line at its end."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    head = f"HTTP/1.1 200 OK\r\n{lines}Content-Length: {length}\r\nDate: {_date(int(time.time()))}\r\n{_SERVER}\r\n"
    return head.encode("utf-8", "surrogateescape")


class _ReadyResponse(web.StreamResponse):
    """A response in one write, for a kept-alive HTTP/1.1 connection with an empty write buffer."""

    def __init__(self, wire: bytes) -> None:
        super().__init__()
        self._wire = wire

    @property
    def keep_alive(self) -> bool:
        return True

    async def prepare(self, request: web.BaseRequest) -> None:
        if request.transport is None:
            raise ConnectionResetError("the client has gone")
        request.transport.write(self._wire)

    async def write_eof(self, data: bytes = b"") -> None:
        """Everything is written."""


def semantic_headers(reply: LookupReply | None) -> dict[str, str]:
    """The similarity of the nearest question, the risk of its answer, and the veto that kept it back."""
    headers: dict[str, str] = {}
    if reply is None or reply.similarity is None:
        return headers
    headers["x-keepgate-similarity"] = f"{reply.similarity:.4f}"
    if reply.risk is not None:
        headers["x-keepgate-risk"] = f"{reply.risk:.5f}"
    if isinstance(reply, LookupMiss) and reply.veto:
        headers["x-keepgate-veto"] = reply.veto
    return headers


def forwarded_headers(upstream: CIMultiDict[str], outcome: Outcome, entry_id: str, collapsed: bool) -> CIMultiDict[str]:
    """The upstream's headers and the cache's, for a request that was forwarded. `entry_id` is where the answer will be
    stored, if it may be; "" if it may not.
    """
    headers = upstream.copy()
    headers.add("Cache-Status", _forwarded(outcome) + ("; collapsed" if collapsed else ""))
    headers["x-keepgate-cache"] = "bypass" if isinstance(outcome, Bypass) else "miss"
    headers["x-keepgate-layer"] = "none"
    if entry_id:
        headers["x-keepgate-entry"] = entry_id
    return headers


def cost_headers(charge: Charge | None, joined: bool) -> dict[str, str]:
    """For an answer that an upstream has computed, for this request or for the one that it `joined`. No estimates."""
    if charge is None or charge.estimated:
        return {}
    cost, saving = (0.0, charge.repeat_cost) if joined else (charge.cost, None)
    headers = {} if cost is None else {COST_HEADER: money(cost)}
    return headers if saving is None else {**headers, SAVING_HEADER: money(saving)}


def _forwarded(outcome: Outcome) -> str:
    match outcome:
        case Bypass(reason):
            return "keepgate; fwd=" + (
                f"request; detail={reason}" if reason in ASKING_FOR_NEW else f"bypass; detail={reason}"
            )
        case Failed():
            return "keepgate; fwd=miss; detail=store-unavailable"
        case Hit(stale=True):
            return "keepgate; fwd=stale"
        case Hit():
            return "keepgate; fwd=request"
    return "keepgate; fwd=uri-miss"
