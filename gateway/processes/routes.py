"""The table of routes."""

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from gateway.api import anthropic, batches, generate, handlers, ollama, page, responses, whole
from gateway.api.app_keys import SETTINGS
from gateway.api.dashboard import dashboard
from gateway.api.identification import identifying
from gateway.api.openapi.document import openapi_handler
from gateway.api.operator import (
    budgets,
    costs,
    engines,
    entries,
    explanation,
    keys,
    prefix_stores,
    purges,
    requests,
    routing,
    semantic,
    statistics,
    warming,
)
from gateway.errors import GatewayError
from gateway.http.cors import answering_preflights, marking_answers
from gateway.http.middleware import answering_errors, mark_started
from gateway.settings.settings import Settings
from gateway.surfaces.registry import error_response, form_of
from gateway.surfaces.whole import ENDPOINTS
from gateway.telemetry.record import RECORD, name_response
from gateway.tenants.callers import Callers


def _error_response(request: web.Request, error: GatewayError) -> web.Response:
    if (record := request.get(RECORD)) is not None:
        record.error = error.label
    return error_response(form_of(request.path), error)


async def _name(request: web.Request, response: web.StreamResponse) -> None:
    if (record := request.get(RECORD)) is not None:
        name_response(response.headers, record)


def build_application(settings: Settings, callers: Callers, parts: Mapping[web.AppKey[Any], Any]) -> web.Application:
    """The application with its table of routes. `parts` are what its handlers use (gateway/api/app_keys.py)."""
    application = web.Application(
        middlewares=[
            answering_preflights(settings.cors_origins),
            answering_errors(_error_response),
            identifying(callers),
        ],
        client_max_size=settings.max_body,
    )
    application[SETTINGS] = settings
    for key, part in parts.items():
        application[key] = part
    application.on_response_prepare.append(mark_started)
    application.on_response_prepare.append(_name)
    application.on_response_prepare.append(marking_answers(settings.cors_origins))
    application.add_routes(
        [
            web.post("/v1/chat/completions", handlers.answer),
            web.post("/v1/completions", handlers.answer),
            web.post("/v1/embeddings", handlers.embed),
            *(web.post(path, whole.answer) for endpoint in ENDPOINTS for path in endpoint.paths),
            web.post("/v1/responses", handlers.answer),
            web.get("/v1/responses/{id}", responses.get),
            web.delete("/v1/responses/{id}", responses.delete),
            web.get("/v1/responses/{id}/input_items", responses.get_input_items),
            web.post("/v1/generate", handlers.answer),
            web.post("/v1/generate/batch", generate.generate_batch),
            web.post("/v1/messages", handlers.answer),
            web.post("/v1/messages/count_tokens", anthropic.count_tokens),
            web.post("/api/chat", ollama.answer_or_load),
            web.post("/api/generate", ollama.answer_or_load),
            web.post("/api/embed", ollama.embed),
            web.post("/api/embeddings", ollama.embed),
            web.get("/api/tags", ollama.list_models),
            web.get("/api/ps", ollama.list_running),
            web.post("/api/show", ollama.show),
            web.post("/api/pull", ollama.pull),
            web.get("/api/version", ollama.show_version),
            web.get("/v1/models", handlers.list_models),
            web.get("/v1/models/{model:.+}", handlers.show_model),
            web.get("/v1/cache/stats", statistics.get_stats),
            web.get("/v1/cache/timeline", statistics.get_timeline),
            web.post("/v1/cache/explain", explanation.explain),
            web.post("/v1/cache/warm", warming.warm),
            web.get("/v1/cache/entries", entries.list_entries),
            web.get("/v1/cache/entries/{id}", entries.get_entry),
            web.delete("/v1/cache/entries/{id}", entries.delete_entry),
            web.delete("/v1/cache", purges.purge),
            web.get("/v1/cache/semantic/decisions", semantic.list_decisions),
            web.get("/v1/cache/semantic/what-if", semantic.what_if),
            web.get("/v1/cache/prefix", prefix_stores.describe),
            web.delete("/v1/cache/prefix", prefix_stores.clear),
            web.post("/v1/cache/prefix/{operation:lookup|pin|unpin}", prefix_stores.operate),
            web.route("*", "/v1/cache{rest:(/.*)?}", handlers.not_found),
            *keys.ROUTES,
            web.route("*", "/v1/keys{rest:(/.*)?}", handlers.not_found),
            web.route("*", "/v1/teams{rest:(/.*)?}", handlers.not_found),
            web.get("/v1/costs", costs.get_costs),
            web.get("/v1/budgets", budgets.list_budgets),
            web.get("/v1/engines", engines.list_engines),
            web.get("/v1/requests", requests.list_requests),
            web.get("/v1/routing", routing.describe),
            web.put("/v1/routing/{model:.+}", routing.override),
            web.delete("/v1/routing/{model:.+}", routing.reset),
            *(batches.ROUTES if settings.batches.enabled else ()),
            web.route("*", "/v1/{rest:.+}", handlers.forward),
            web.get("/", page.show),
            *dashboard.ROUTES,
            web.get("/openapi.json", openapi_handler(application)),
            web.get("/health", handlers.health),
            web.get("/ready", handlers.ready),
            web.get("/metrics", handlers.expose_metrics),
        ]
    )
    return application
