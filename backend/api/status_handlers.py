"""The endpoints that describe the server: its model, health, readiness and metrics."""

from __future__ import annotations

from aiohttp import web

from backend.api.http_body import json_response
from backend.api.metrics import CONTENT_TYPE
from backend.api.prefix_handlers import describe_engine_store
from backend.api.server_state import STATE, ServerState
from backend.engine.model_runner import BLOCK_SIZE
from backend.errors import Unavailable
from backend.protocol import check_model
from backend.responses.model_info import describe


async def list_models(request: web.Request) -> web.Response:
    """``GET /v1/models``."""
    return json_response({"object": "list", "data": [_model_object(request.app[STATE])]})


async def get_model(request: web.Request) -> web.Response:
    """``GET /v1/models/{id}``."""
    state = request.app[STATE]
    check_model(request.match_info["model"], state.model.name)
    return json_response(_model_object(state))


async def model_info(request: web.Request) -> web.Response:
    """``GET /v1/model/info``: how the model is computed, and what fits its memory."""
    state = request.app[STATE]
    lossy = state.prefix_config.lossy_codec if state.prefix_config is not None else None
    return json_response(describe(state.model, state.metrics.stats, lossy.name if lossy is not None else None))


async def engine_status(request: web.Request) -> web.Response:
    """``GET /engine``: what the engine does now, and what its prefix store has done; null without one."""
    state = request.app[STATE]
    opened = state.opened_store
    return json_response(
        {
            "object": "keepgate.engine",
            "model": state.model.name,
            "runner": state.model.runner.name,
            "alive": state.engine.alive,
            **state.metrics.status(BLOCK_SIZE * state.model.runner.kv_bytes_per_token),
            "prefix_store": None if opened is None else describe_engine_store(state, opened),
        }
    )


async def health(request: web.Request) -> web.Response:
    """``GET /health``: whether the engine runs."""
    _check_engine(request)
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """``GET /ready``: whether requests are accepted. The server listens only after the model has warmed up."""
    _check_engine(request)
    return json_response({"status": "ready", "model": request.app[STATE].model.name})


async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics`` for Prometheus."""
    return web.Response(body=request.app[STATE].metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


def _check_engine(request: web.Request) -> None:
    engine = request.app[STATE].engine
    if not engine.alive:
        raise Unavailable(engine.unavailable_because)


def _model_object(state: ServerState) -> dict[str, object]:
    return {"id": state.model.name, "object": "model", "created": state.created, "owned_by": "keepgate"}
