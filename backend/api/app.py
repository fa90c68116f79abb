"""The aiohttp application of one served model: its endpoints, its engine and the form of every error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from backend.api import openai_handlers, prefix_handlers, status_handlers
from backend.api.http_body import MAX_BODY_BYTES
from backend.api.http_server import UNEXPECTED, error_response, request_error_of
from backend.api.prefix_store import open_prefixes
from backend.api.server_state import STATE, ServerState
from backend.api.traces import begin_trace, end_trace
from backend.engine.config import EngineConfig
from backend.engine.step import Speculator
from backend.errors import RequestError
from backend.model import ServedModel
from prefix_store.peers.protocol import PATH as BLOCKS_PATH
from telemetry.tracing.span import NO_TRACING, Tracing

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(
    model: ServedModel,
    engine_config: EngineConfig,
    tracing: Tracing = NO_TRACING,
    speculator: Speculator | None = None,
) -> web.Application:
    """The application; its engine starts and stops with it.

    Args:
        speculator: proposes drafts to the engine; None: none are verified.
    """
    app = web.Application(middlewares=[_answer_errors], client_max_size=MAX_BODY_BYTES)
    app[STATE] = ServerState(model, engine_config, tracing, speculator)
    app.cleanup_ctx.append(_run_engine)
    app.add_routes(
        [
            web.post("/v1/chat/completions", openai_handlers.chat_completions),
            web.post("/v1/completions", openai_handlers.completions),
            web.post("/v1/embeddings", openai_handlers.embeddings),
            web.post("/tokenize", openai_handlers.tokenize),
            web.post("/detokenize", openai_handlers.detokenize),
            web.get("/v1/prefix", prefix_handlers.describe_prefixes),
            web.delete("/v1/prefix", prefix_handlers.clear_prefixes),
            web.post("/v1/prefix/lookup", prefix_handlers.look_up_prefix),
            web.post("/v1/prefix/pin", prefix_handlers.pin_prefix),
            web.post("/v1/prefix/unpin", prefix_handlers.unpin_prefix),
            web.post(BLOCKS_PATH, prefix_handlers.prefix_blocks),
            web.get("/v1/models", status_handlers.list_models),
            web.get("/v1/models/{model:.+}", status_handlers.get_model),
            web.get("/v1/model/info", status_handlers.model_info),
            web.get("/engine", status_handlers.engine_status),
            web.get("/health", status_handlers.health),
            web.get("/ready", status_handlers.ready),
            web.get("/metrics", status_handlers.metrics),
        ]
    )
    return app


async def _run_engine(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    async with open_prefixes(state):
        state.engine.start()
        yield
        if state.engine.alive:
            await state.engine.stop()
    state.grammar_threads.shutdown(wait=False, cancel_futures=True)
    state.reader.close()


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers every error in OpenAI's form, without a traceback; counts and traces the request."""
    state = request.app[STATE]
    span = begin_trace(state.tracing, request, state.model.name)
    status = 499  # nginx's code for a client that disconnected; only the metrics show it
    try:
        response = await handler(request)
        status = response.status
        return response
    except RequestError as error:
        status = error.status
        return error_response(error)
    except web.HTTPException as error:
        request_error = request_error_of(error, request)
        status = request_error.status
        return error_response(request_error)
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception:
        status = 500
        # A traceback shows code, never a body.
        logger.exception("unexpected failure in a handler")
        return error_response(UNEXPECTED)
    finally:
        resource = request.match_info.route.resource
        endpoint = resource.canonical if resource is not None else "unknown"
        state.metrics.requests.labels(endpoint, str(status)).inc()
        end_trace(span, status)
