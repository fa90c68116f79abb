"""Purging the cache, and erasing a tenant from it, for the operator."""

import time
from typing import Any

import msgspec
from aiohttp import web

from cache.entries.generations import Scope
from cache.errors import StoreUnavailable
from gateway.api.access import require_operator
from gateway.api.app_keys import CACHE, CONVERSATIONS, SEMANTIC
from gateway.errors import CacheUnavailable, InvalidRequest
from gateway.telemetry.audit import audit

_encode = msgspec.json.Encoder().encode

_SCOPES: dict[str, Scope] = {"namespace": "namespace", "model": "model", "tenant": "namespace"}


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


def _json(value: Any) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")
