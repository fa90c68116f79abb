"""Looking at the entries of the cache, for the operator; at its own also for a tenant."""

import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from aiohttp import web

from cache.entries.entry import Entry
from cache.entries.key import namespace_for, namespace_of
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.index.entry_index import MAX_PAGE, EntryFilter, InvalidCursor
from cache.index.fingerprint import decode_fingerprint
from gateway.api.access import require_operator
from gateway.api.app_keys import CACHE, SEMANTIC
from gateway.api.identification import caller_of
from gateway.api.operator.keys import REGISTRY
from gateway.errors import AdminForbidden, AdminKeyRequired, CacheUnavailable, InvalidRequest, NotFound
from gateway.http.cache_control import TAGS_HEADER, is_tag
from gateway.telemetry.audit import audit

_encode = msgspec.json.Encoder().encode

_PARAMETERS = (
    "model",
    "namespace",
    "key",
    "layer",
    "tag",
    "min_age",
    "max_age",
    "min_hits",
    "order",
    "text",
    "limit",
    "cursor",
)
_DEFAULT_LIMIT = 50
_LOADED_AT_ONCE = 100
# A filter that the index does not know is applied to entries that are loaded: for so long, then the client goes on.
_SEARCH_SECONDS = 0.25


class EntryCost(msgspec.Struct, kw_only=True):
    """What the answer took to compute; `dollars` is null where no price is known."""

    prompt_tokens: int
    completion_tokens: int
    seconds: float
    dollars: float | None


class EntrySummary(msgspec.Struct, kw_only=True):
    """An entry without its answer. Times are Unix seconds, `age` and `fresh_for` seconds. `hits` is how often it was
    served, null where the shared store does not say; `options` are fields of its request that say nothing of a person.
    """

    id: str
    namespace: str
    family: str
    model: str
    created: float
    age: float
    fresh_for: float
    stale: bool
    bytes: int
    hits: int | None
    layers: list[Literal["exact", "semantic"]]
    cost: EntryCost
    upstream: str
    options: dict[str, str | int | float | bool]
    messages: int
    tags: list[str]


class CacheEntry(EntrySummary, kw_only=True):
    """`answer` is null if it is no JSON."""

    content_type: str
    answer: Any


class EntryPage(msgspec.Struct, kw_only=True):
    """`searched` is how many entries were looked at; `next` is the cursor of the next page, null after the last one."""

    object: Literal["list"] = "list"
    data: list[EntrySummary]
    searched: int
    next: str | None


class _Search(NamedTuple):
    """What of a listing only the entries themselves tell."""

    model: str
    is_semantic: bool
    tag: str
    text: str


async def list_entries(request: web.Request) -> web.Response:
    """GET /v1/cache/entries: a page of entries without their answers, the newest first, or the hottest."""
    wanted, search, limit = await _wanted(request)
    cache = request.app[CACHE]
    try:
        await cache.index.flush()
        data, searched, cursor = await _page(cache, wanted, search, request.query.get("cursor"), limit)
    except InvalidCursor as error:
        raise InvalidRequest("'cursor' must be the 'next' of an earlier page.", param="cursor") from error
    except StoreUnavailable as error:
        raise CacheUnavailable(f"The shared store does not answer: {error}.") from error
    return _json(EntryPage(data=data, searched=searched, next=cursor))


async def _page(
    cache: ExactCache, wanted: EntryFilter, search: _Search, cursor: str | None, limit: int
) -> tuple[list[EntrySummary], int, str | None]:
    """(entries, how many were looked at, the next cursor)."""
    found: list[EntrySummary] = []
    searched, end = 0, time.monotonic() + _SEARCH_SECONDS
    while True:
        page = await cache.index.page(wanted, cursor, min(limit - len(found), _LOADED_AT_ONCE))
        cursor = page.next
        searched += len(page.ids)
        entries = await cache.entries(page.ids)
        for entry, summary in zip(entries, await summaries(cache, entries, time.time()), strict=True):
            if _is_found(entry, summary, search) and wanted.since <= entry.created <= wanted.until:
                found.append(summary)
        if cursor is None or len(found) >= limit or time.monotonic() > end:
            return found, searched, cursor


async def summaries(cache: ExactCache, entries: Sequence[Entry], now: float) -> list[EntrySummary]:
    """Of entries, in their order. Raises StoreUnavailable."""
    ids = [entry.id for entry in entries]
    hits, semantic = await cache.index.hits(ids), await cache.index.in_semantic(ids)
    return [
        EntrySummary(**_fields(entry, now, served, is_semantic=is_semantic))
        for entry, served, is_semantic in zip(entries, hits, semantic, strict=True)
    ]


def _is_found(entry: Entry, summary: EntrySummary, search: _Search) -> bool:
    return (
        search.model in ("", entry.model)
        and ("semantic" in summary.layers or not search.is_semantic)
        and (not search.tag or search.tag in summary.tags)
        and (not search.text or search.text in entry.body.decode(errors="replace").casefold())
    )


async def _wanted(request: web.Request) -> tuple[EntryFilter, _Search, int]:
    query = request.query
    for field in query:
        if field not in _PARAMETERS:
            raise InvalidRequest(f"'{field}' is no parameter of a listing; use {', '.join(_PARAMETERS)}.", param=field)
    now = time.time()
    namespace = await _namespace(request)
    for field, allowed in (("layer", ("exact", "semantic")), ("order", ("newest", "hits"))):
        if query.get(field, allowed[0]) not in allowed:
            raise InvalidRequest(f"'{field}' must be {' or '.join(allowed)}.", param=field)
    wanted = EntryFilter(
        model=query.get("model", ""),
        namespace=namespace,
        since=now - number_of(query, "max_age", now),
        until=now - number_of(query, "min_age", 0) if "min_age" in query else float("inf"),
        min_hits=round(number_of(query, "min_hits", 0)),
        hottest=query.get("order") == "hits",
    )
    if "tag" in query and not is_tag(query["tag"]):
        raise InvalidRequest(f"'tag' must be one name, as requests have them in {TAGS_HEADER}.", param="tag")
    limit = round(number_of(query, "limit", _DEFAULT_LIMIT))
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"'limit' must be a number from 1 to {MAX_PAGE}.", param="limit")
    search = _Search(
        query.get("model", ""),
        query.get("layer") == "semantic",
        query.get("tag", ""),
        query.get("text", "").casefold(),
    )
    return wanted, search, limit


async def _namespace(request: web.Request) -> str:
    """The namespace that is asked for, "" for all; a tenant has only its own."""
    caller = caller_of(request)
    try:
        require_operator(request)
    except (AdminForbidden, AdminKeyRequired):
        if caller is None or "namespace" in request.query or "key" in request.query:
            raise
        return caller.namespace
    if "key" in request.query and "namespace" in request.query:
        raise InvalidRequest("A listing takes one of namespace and key.", param="key")
    return await namespace_asked(request)


async def namespace_asked(request: web.Request) -> str:
    """The namespace of the query's `namespace` or `key`, the id of a virtual key; "" for neither."""
    if "key" not in request.query:
        return request.query.get("namespace", "")
    registry = request.app.get(REGISTRY)
    if registry is None:
        raise InvalidRequest("'key' needs virtual keys, which need a Redis.", param="key")
    return namespace_for((await registry.get(request.query["key"])).tenant)


def number_of(query: Any, field: str, default: float) -> float:
    """A parameter that is a number, 0 or more. Raises InvalidRequest."""
    try:
        number = float(query.get(field, default))
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e12:
        raise InvalidRequest(f"'{field}' must be a number, 0 or more.", param=field)
    return number


def _fields(entry: Entry, now: float, hits: int | None, *, is_semantic: bool) -> dict[str, Any]:
    """Of an EntrySummary."""
    age = entry.age(now)
    known = decode_fingerprint(entry.asked)
    return {
        "id": entry.id,
        "namespace": namespace_of(entry.id),
        "family": entry.family,
        "model": entry.model,
        "created": entry.created,
        "age": age,
        "fresh_for": entry.fresh_for,
        "stale": age >= entry.fresh_for,
        "bytes": len(entry.body),
        "hits": hits,
        "layers": ["exact", "semantic"] if is_semantic else ["exact"],
        "cost": EntryCost(
            prompt_tokens=entry.prompt_tokens,
            completion_tokens=entry.completion_tokens,
            seconds=entry.seconds,
            dollars=entry.cost,
        ),
        "upstream": entry.upstream,
        "options": {} if known is None else {name: value for name, value in known.values.items() if name != "model"},
        "messages": 0 if known is None else len(known.messages),
        "tags": [tag.name for tag in entry.tags],
    }


async def get_entry(request: web.Request) -> web.Response:
    """GET /v1/cache/entries/{id}: the stored answer and its cost."""
    entry = await _entry(request)
    index = request.app[CACHE].index
    try:
        (hits,), (is_semantic,) = await index.hits([entry.id]), await index.in_semantic([entry.id])
    except StoreUnavailable:  # it is in memory
        hits, is_semantic = None, False
    return _json(
        CacheEntry(
            **_fields(entry, time.time(), hits, is_semantic=is_semantic),
            content_type=entry.content_type or "application/json",
            answer=_answer(entry),
        )
    )


def _answer(entry: Entry) -> Any:
    """The answer as JSON; None for audio and the like, whose bytes would say nothing."""
    if not entry.content_type:
        return msgspec.Raw(entry.body)
    try:
        return msgspec.json.decode(entry.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


async def delete_entry(request: web.Request) -> web.Response:
    """DELETE /v1/cache/entries/{id}: forget one answer, in every worker.

    With `?reason=wrong` the answer was wrong for the question it was served for: the semantic policy learns from it.
    """
    is_wrong = _is_wrong(request)
    entry = await _entry(request)
    deleted: dict[str, Any] = {"id": entry.id, "deleted": True}
    try:
        if is_wrong:  # first, so that it can be repeated if the service did not get it
            deleted["labels"] = (await request.app[SEMANTIC].wrong(entry.id)).labels
        await request.app[CACHE].delete(entry.id)
        await request.app[SEMANTIC].forget(entry.id)
    except StoreUnavailable as error:
        raise CacheUnavailable(f"The entry is not gone from everywhere, and may be deleted again: {error}.") from error
    caller = caller_of(request)
    is_own = caller is not None and namespace_of(entry.id) == caller.namespace
    audit(request, "cache.delete", entry.id, who="tenant" if is_own else "", wrong=is_wrong)
    return _json(deleted)


def _is_wrong(request: web.Request) -> bool:
    for field in request.query:
        if field != "reason":
            raise InvalidRequest(f"'{field}' is no parameter of a deletion; use reason=wrong.", param=field)
    if request.query.get("reason", "wrong") != "wrong":
        raise InvalidRequest("'reason' must be wrong, or be left out.", param="reason")
    return "reason" in request.query


async def _entry(request: web.Request) -> Entry:
    """The entry of the path, if the caller may see it; another tenant's is reported as not found."""
    entry_id = request.match_info["id"]
    caller = caller_of(request)
    if caller is None or namespace_of(entry_id) != caller.namespace:
        require_operator(request)
    try:
        entry = await request.app[CACHE].entry(entry_id)
    except StoreUnavailable as error:
        raise CacheUnavailable(f"The shared store does not answer: {error}.") from error
    if entry is None:
        raise NotFound(f"There is no entry {entry_id!r}; it may have expired or been purged.", param="id")
    return entry


def _json(value: Any) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")
