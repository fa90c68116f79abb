"""The inspection API of the cache, for the operator; an entry also for the tenant that owns it."""

import time
from typing import Any

import msgspec
from aiohttp import web

from cache.entries.entry import Entry
from cache.entries.generations import Scope
from cache.entries.key import namespace_of
from cache.errors import StoreUnavailable
from gateway.api import stats
from gateway.api.access import require_operator
from gateway.api.app_keys import CACHE, CONVERSATIONS, GAUGES, SEMANTIC
from gateway.api.identification import caller_of
from gateway.errors import CacheUnavailable, InvalidRequest, NotFound
from gateway.telemetry.audit import audit

_encode = msgspec.json.Encoder().encode

_SCOPES: dict[str, Scope] = {"namespace": "namespace", "model": "model", "tenant": "namespace"}


async def get_stats(request: web.Request) -> web.Response:
    """GET /v1/cache/stats."""
    require_operator(request)
    request.app[GAUGES].refresh()
    return _json(await stats.collect(request.app[CACHE], request.app[SEMANTIC]))


async def get_entry(request: web.Request) -> web.Response:
    """GET /v1/cache/entries/{id}: the stored answer and its cost."""
    entry = await _entry(request)
    age = entry.age(time.time())
    return _json(
        {
            "id": entry.id,
            "namespace": namespace_of(entry.id),
            "family": entry.family,
            "model": entry.model,
            "created": entry.created,
            "age": age,
            "fresh_for": entry.fresh_for,
            "stale": age >= entry.fresh_for,
            "bytes": len(entry.body),
            "cost": {
                "prompt_tokens": entry.prompt_tokens,
                "completion_tokens": entry.completion_tokens,
                "seconds": entry.seconds,
            },
            "content_type": entry.content_type or "application/json",
            "answer": _answer(entry),
        }
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


async def purge(request: web.Request) -> web.Response:
    """DELETE /v1/cache: everything, or `?namespace=` or `?model=`; with `?tenant=` it is also removed, and counted."""
    require_operator(request)
    scope, name = _purge_scope(request)
    if "tenant" in request.query:
        return await _erase(request, name)
    try:
        await request.app[SEMANTIC].purged(scope, name)
        await request.app[CACHE].purge(scope, name)
    except StoreUnavailable as error:
        audit(request, "cache.purge", name, scope=scope, is_complete=False)
        raise CacheUnavailable(f"The purge holds in this worker, but not in the shared store: {error}.") from error
    audit(request, "cache.purge", name, scope=scope)
    return _json({"purged": scope} if scope == "all" else {"purged": scope, scope: name})


async def _erase(request: web.Request, namespace: str) -> web.Response:
    """Removes what is stored of a tenant, by its namespace, and says what is left."""
    begun = time.monotonic()
    try:
        await request.app[SEMANTIC].purged("namespace", namespace)
        erased = await request.app[CACHE].erase(namespace)
    except StoreUnavailable as error:
        audit(request, "cache.erase", namespace, is_complete=False)
        raise CacheUnavailable(
            f"Nothing of the tenant is served in this worker, but the shared store may still have it: {error}. "
            "Repeat the request."
        ) from error
    responses = request.app[CONVERSATIONS].forget(namespace)
    audit(request, "cache.erase", namespace, remaining=erased.remaining)
    return _json(
        {
            "erased": "tenant",
            "tenant": namespace,
            "found": erased.found + responses,
            "removed": erased.removed + responses,
            "remaining": erased.remaining,
            "seconds": round(time.monotonic() - begun, 3),
            "verified": erased.remaining == 0,
        }
    )


def _purge_scope(request: web.Request) -> tuple[Scope, str]:
    query = request.query
    for field in query:
        if field not in _SCOPES:
            raise InvalidRequest(f"'{field}' is no parameter of a purge; use namespace, model or tenant.", param=field)
    if len(query) > 1:
        raise InvalidRequest("A purge takes one of namespace, model and tenant, once.", param=list(query.keys())[-1])
    for field, scope in _SCOPES.items():
        if field in query:
            if not query[field]:
                raise InvalidRequest(f"'{field}' is empty; name one, or leave it out to purge everything.", param=field)
            return scope, query[field]
    return "all", ""


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
