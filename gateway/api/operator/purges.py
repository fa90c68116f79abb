"""Purging the cache, and erasing a tenant from it, for the operator."""

import time
from typing import Any

import msgspec
from aiohttp import web

from cache.entries.generations import Scope, new_purge, purge_before
from cache.errors import StoreUnavailable
from gateway.api.access import require_operator
from gateway.api.app_keys import CACHE, CONVERSATIONS, SEMANTIC
from gateway.api.operator.entries import number_of
from gateway.errors import CacheUnavailable, InvalidRequest
from gateway.http.cache_control import TAGS_HEADER, is_tag
from gateway.telemetry.audit import audit

_encode = msgspec.json.Encoder().encode

_SCOPES: dict[str, Scope] = {
    "namespace": "namespace",
    "model": "model",
    "tag": "tag",
    "layer": "layer",
    "tenant": "namespace",
}
_PARAMETERS = (*_SCOPES, "min_age")


async def purge(request: web.Request) -> web.Response:
    """DELETE /v1/cache: everything, or what is of a `?namespace=`, `?model=` or `?tag=`, or `?min_age=` seconds old.

    With `?layer=semantic` answers are not served to similar questions any more; with `?tenant=` what is of that
    namespace is also removed, and counted.
    """
    require_operator(request)
    scope, name = _purge_scope(request)
    if "tenant" in request.query:
        return await _erase(request, name)
    before = time.time() - (float(name) if scope == "before" else 0.0)
    cache, semantic = request.app[CACHE], request.app[SEMANTIC]
    try:
        if scope in ("before", "layer"):
            layer = name if scope == "layer" else ""
            await semantic.purged(purge_before(before, layer))
            await cache.purge_before(before, layer)
        else:
            await semantic.purged(new_purge(scope, name))
            await cache.purge(scope, name)
    except StoreUnavailable as error:
        audit(request, "cache.purge", name, scope=scope, is_complete=False)
        raise CacheUnavailable(f"The purge holds in this worker, but not in the shared store: {error}.") from error
    audit(request, "cache.purge", name, scope=scope)
    said: dict[str, Any] = {"purged": scope}
    if scope != "all":
        said[scope] = before if scope == "before" else name
    return _json(said)


async def _erase(request: web.Request, namespace: str) -> web.Response:
    """Removes what is stored of a tenant, by its namespace, and says what is left."""
    begun = time.monotonic()
    try:
        await request.app[SEMANTIC].purged(new_purge("namespace", namespace))
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
    """The scope, and its name; of "before", an age in seconds."""
    query = request.query
    for field in query:
        if field not in _PARAMETERS:
            raise InvalidRequest(f"'{field}' is no parameter of a purge; use {', '.join(_PARAMETERS)}.", param=field)
    if len(query) > 1:
        raise InvalidRequest(f"A purge takes one of {', '.join(_PARAMETERS)}, once.", param=list(query.keys())[-1])
    if "min_age" in query:
        number_of(query, "min_age", 0)
        return "before", query["min_age"]
    for field, scope in _SCOPES.items():
        if field in query:
            if not query[field]:
                raise InvalidRequest(f"'{field}' is empty; name one, or leave it out to purge everything.", param=field)
            if field == "layer" and query[field] != "semantic":
                raise InvalidRequest(
                    "'layer' must be semantic: the answers of all layers are the entries of the exact one, which are "
                    "purged without it.",
                    param=field,
                )
            if field == "tag" and not is_tag(query[field]):
                raise InvalidRequest(f"'tag' must be one name, as requests have them in {TAGS_HEADER}.", param=field)
            return scope, query[field]
    return "all", ""


def _json(value: Any) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")
