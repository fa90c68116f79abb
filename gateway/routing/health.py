"""Active health checks, which also ask each upstream what it has: its models, and endpoints that not all have."""

import asyncio
import logging
from collections.abc import Sequence

from gateway.errors import UpstreamError
from gateway.http.sse import event_json
from gateway.upstreams.loaded import RUNNING_PATH, loaded_of_listed, loaded_of_running
from gateway.upstreams.upstream import Upstream

log = logging.getLogger(__name__)

_MAX_LISTED_BYTES = 8 * 2**20
_OK = 200
_SERVER_ERROR = 500
_NOT_IMPLEMENTED = 501


async def check(upstream: Upstream, deadline: float, probed: Sequence[str]) -> bool:
    """Note how the upstream is and what it has; each request gets `deadline` seconds. `probed` are endpoints.

    Returns whether it answered when it was asked for its models.
    """
    _, has_answered = await asyncio.gather(_check_health(upstream, deadline), _fetch_models(upstream, deadline))
    if upstream.is_well:
        upstream.breaker.checked()
    if upstream.reachable and not upstream.probed:
        upstream.probed = True
        upstream.lacks.intersection_update(probed)
        await asyncio.gather(*(_probe(upstream, path, deadline) for path in probed))
    return has_answered


async def _check_health(upstream: Upstream, deadline: float) -> None:
    path = upstream.settings.health_path
    if path is None:
        return
    try:
        async with asyncio.timeout(deadline):
            with await upstream.request("GET", path, {}, None) as answer:
                upstream.is_healthy = 200 <= answer.status < 300
    except (UpstreamError, TimeoutError) as error:
        upstream.is_healthy = False
        log.debug("%s: %s: %s", upstream.title, path, error)


async def _fetch_models(upstream: Upstream, deadline: float) -> bool:
    """Returns whether it answered, if only that it has no list."""
    is_check = upstream.settings.health_path is None
    try:
        async with asyncio.timeout(deadline):
            with await upstream.request("GET", "/v1/models", {}, None) as answer:
                body = await answer.body(_MAX_LISTED_BYTES)
        if is_check:  # a server may have no list of models, and need a credential for it
            upstream.is_healthy = answer.status < _SERVER_ERROR or answer.status == _NOT_IMPLEMENTED
        if answer.status != _OK:
            return answer.status < _SERVER_ERROR
        listed = event_json(body).get("data")
        if isinstance(listed, list):
            upstream.loaded = loaded_of_listed(listed) or upstream.loaded
            owners = [item.get("owned_by") for item in listed if isinstance(item, dict)]
            upstream.is_vllm = bool(owners) and all(owner == "vllm" for owner in owners)
            names = (item.get("id") for item in listed if isinstance(item, dict))
            upstream.models = (
                frozenset(name for name in names if isinstance(name, str)) | upstream.settings.models.keys()
            )
    except ValueError as error:
        log.debug("%s: models unknown: %s", upstream.title, error)
    except (UpstreamError, TimeoutError) as error:
        if is_check:
            upstream.is_healthy = False
        log.debug("%s: models unknown: %s", upstream.title, error)
        return False
    return True


async def fetch_running(upstream: Upstream, deadline: float) -> None:
    """Note which models are in memory, where the upstream tells."""
    if RUNNING_PATH in upstream.lacks:
        return
    try:
        async with asyncio.timeout(deadline):
            with await upstream.request("GET", RUNNING_PATH, {}, None) as answer:
                body = await answer.body(_MAX_LISTED_BYTES)
        loaded = loaded_of_running(event_json(body)) if answer.status == _OK else None
    except (ValueError, UpstreamError, TimeoutError) as error:
        log.debug("%s: models in memory unknown: %s", upstream.title, error)
        return
    if loaded is not None:
        upstream.loaded = loaded
    elif answer.status < _SERVER_ERROR:
        upstream.lacks.add(RUNNING_PATH)


async def _probe(upstream: Upstream, path: str, deadline: float) -> None:
    """Note that the upstream lacks an endpoint. One that has it refuses an empty request, and computes nothing."""
    try:
        async with asyncio.timeout(deadline):
            with await upstream.request("POST", path, {"Content-Type": "application/json"}, b"{}") as answer:
                is_lacking = answer.status in (404, 405, 501)
                (upstream.lacks.add if is_lacking else upstream.lacks.discard)(path)
                # Other statuses, such as 401, may say nothing of the path.
                (upstream.has.add if answer.status in (400, 422) else upstream.has.discard)(path)
    except (UpstreamError, TimeoutError) as error:
        log.debug("%s: %s: %s", upstream.title, path, error)
