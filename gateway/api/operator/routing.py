"""The operator's view of routing: models, strategies and upstreams; and strategies that are set while running."""

from typing import Any

import msgspec
from aiohttp import web

from gateway.api.access import require_operator
from gateway.api.app_keys import OVERRIDES, ROUTER, ROUTING, SETTINGS, VIEWS
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
    routing, router, views = request.app[ROUTING], request.app[ROUTER], request.app[VIEWS]
    return _json(
        {
            "strategy": routing.name_of(""),
            "strategies": STRATEGIES,
            "models": {
                model: {
                    "strategy": strategy,
                    "source": routing.source_of(model),
                    "upstreams": routing.models.upstreams(model),
                }
                for model, strategy in routing.strategies()
            },
            "unlisted_models": routing.models.unlisted(router.models),
            "remembered_blocks": len(routing.history),
            "upstreams": [
                {**_upstream(upstream), "kv_blocks": views.published(upstream.name)} for upstream in router.upstreams
            ],
        }
    )


async def override(request: web.Request) -> web.Response:
    """PUT /v1/routing/{model} with {"strategy": …}: in all workers and gateways that share Redis."""
    require_operator(request)
    settings = request.app[SETTINGS]
    fields = decode_object(await read_body(request, settings.max_body, settings.timeouts.client))
    strategy, model = fields.get("strategy"), request.match_info["model"]
    if not isinstance(strategy, str) or len(fields) != 1:
        raise InvalidRequest(
            f"The body must be an object with 'strategy', one of {', '.join(STRATEGIES)}.", param="strategy"
        )
    await request.app[OVERRIDES].set(model, strategy)
    audit(request, "routing.switch", model, strategy=strategy)
    return _strategy(request, model)


async def reset(request: web.Request) -> web.Response:
    """DELETE /v1/routing/{model}: the settings say the model's strategy again; also where they did before."""
    require_operator(request)
    model = request.match_info["model"]
    await request.app[OVERRIDES].remove(model)
    audit(request, "routing.reset", model)
    return _strategy(request, model)


def _strategy(request: web.Request, model: str) -> web.Response:
    routing = request.app[ROUTING]
    return _json({"model": model, "strategy": routing.name_of(model), "source": routing.source_of(model)})


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
