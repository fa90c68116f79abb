"""The operator's view of routing: models, strategies and upstreams; and the switch of a strategy."""

from typing import Any

import msgspec
from aiohttp import web

from gateway.api.access import require_operator
from gateway.api.app_keys import ROUTER, ROUTING, SETTINGS
from gateway.errors import InvalidRequest
from gateway.http.body import read_body
from gateway.http.json_object import decode_object
from gateway.routing.strategies.registry import STRATEGIES
from gateway.telemetry.audit import audit
from gateway.upstreams.upstream import Upstream

_encode = msgspec.json.Encoder().encode


async def describe(request: web.Request) -> web.Response:
    """GET /v1/routing: each model's strategy and upstreams, and the state of each upstream."""
    require_operator(request)
    routing, router = request.app[ROUTING], request.app[ROUTER]
    return _json(
        {
            "strategy": routing.name_of(""),
            "strategies": STRATEGIES,
            "models": {
                model: {"strategy": strategy, "upstreams": routing.models.upstreams(model)}
                for model, strategy in routing.strategies()
            },
            "unlisted_models": routing.models.unlisted(router.models),
            "remembered_blocks": len(routing.history),
            "upstreams": [_upstream(upstream) for upstream in router.upstreams],
        }
    )


async def switch(request: web.Request) -> web.Response:
    """PUT /v1/routing/{model} with {"strategy": …}: until the settings are loaded again, in this worker."""
    require_operator(request)
    settings = request.app[SETTINGS]
    fields = decode_object(await read_body(request, settings.max_body, settings.timeouts.client))
    strategy, model = fields.get("strategy"), request.match_info["model"]
    if not isinstance(strategy, str) or len(fields) != 1:
        raise InvalidRequest(
            f"The body must be an object with 'strategy', one of {', '.join(STRATEGIES)}.", param="strategy"
        )
    request.app[ROUTING].use(model, strategy)
    audit(request, "routing.switch", model, strategy=strategy)
    return _json({"model": model, "strategy": strategy})


def _upstream(upstream: Upstream) -> dict[str, Any]:
    return {
        "name": upstream.name,
        "state": upstream.state,
        "weight": upstream.weight,
        "in_flight": upstream.in_flight,
        "latency": upstream.latency or None,
        "models": None if upstream.models is None else sorted(upstream.models),
    }


def _json(value: Any) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")
