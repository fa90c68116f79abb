"""The HTTP face of the engine: OpenAI's endpoints over one served model."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from backend.answers import Answer, AnswerFormat, ChatFormat, CompletionFormat
from backend.async_engine import NOT_RUNNING, AsyncEngine, Generation
from backend.config import EngineConfig
from backend.embeddings import embeddings_answer
from backend.engine import Engine, Output
from backend.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    ErrorAnswer,
    GenerationFailed,
    InvalidRequest,
    ModelNotFound,
    RequestError,
    Unavailable,
)
from backend.grammar import GrammarConstraint
from backend.http_server import UNEXPECTED, error_response, translated
from backend.metrics import CONTENT_TYPE, Metrics
from backend.model import ServedModel
from backend.model_info import describe
from backend.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    decode_request,
)
from backend.requests import RequestReader, Work
from backend.sequence import FinishReason, Sequence

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 2**20
SEND_TIMEOUT_SECONDS = 60.0
"""A reader that takes nothing for so long is cut off, and its sequences with it."""
BODY_TIMEOUT_SECONDS = 30.0
"""A sender gets so long for its body."""
_STARTED: web.RequestKey[float | None] = web.RequestKey("_STARTED")
_FORM_THREADS = 2
_LARGE_BODY = 16 * 2**10
_USAGE_HEADER = "x-keepgate-usage"
_TIMEOUT_HEADER = "x-request-timeout"
_TELL_TENANTS = ("Authorization", "x-api-key", "api-key", "x-keepgate-namespace")
_LONGEST_TIMEOUT = 86_400.0

Read = TypeVar("Read")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServerState:
    """What the handlers share."""

    def __init__(self, model: ServedModel, engine_config: EngineConfig) -> None:
        self.model = model
        most_sequences = (engine_config.max_batch or model.runner.max_batch) + engine_config.max_waiting
        self.max_seconds = engine_config.max_seconds
        engine = Engine(
            model.runner,
            engine_config.max_batch,
            engine_config.step_tokens,
            engine_config.batching,
            engine_config.shares_prefixes,
        )
        self.metrics = Metrics(engine.stats())
        self.engine = AsyncEngine(engine, most_sequences, self.metrics.note_step)
        self.reader = RequestReader(model, min(most_sequences, 128))
        # Threads of their own, so that nobody else's request waits for grammars.
        self.form_threads = ThreadPoolExecutor(_FORM_THREADS, thread_name_prefix="form")
        self.created = int(time.time())

    @property
    def fingerprint(self) -> str:
        """Says which computation answered, as ``system_fingerprint`` does at OpenAI."""
        return f"keepgate-{self.model.runner.name}"


STATE = web.AppKey("STATE", ServerState)


def create_app(model: ServedModel, engine_config: EngineConfig) -> web.Application:
    """The application; its engine starts and stops with it."""
    app = web.Application(middlewares=[_answer_errors], client_max_size=MAX_BODY_BYTES)
    app[STATE] = ServerState(model, engine_config)
    app.cleanup_ctx.append(_run_engine)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/v1/embeddings", embeddings),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{model:.+}", get_model),
            web.get("/v1/model/info", model_info),
            web.get("/health", health),
            web.get("/ready", ready),
            web.get("/metrics", metrics),
        ]
    )
    return app


async def _run_engine(app: web.Application) -> AsyncIterator[None]:
    engine = app[STATE].engine
    engine.start()
    yield
    if engine.alive:
        await engine.stop()
    app[STATE].form_threads.shutdown(wait=False, cancel_futures=True)
    app[STATE].reader.close()


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``."""
    state = request.app[STATE]
    body = await _read_body(request)
    chat = await _off_loop(body, lambda: decode_request(body, ChatRequest))
    if state.reader.has_form(chat):
        work = await asyncio.get_running_loop().run_in_executor(state.form_threads, state.reader.chat, chat)
    elif len(body) >= _LARGE_BODY or state.reader.takes_time(chat):
        work = await asyncio.to_thread(state.reader.chat, chat)
    else:
        work = state.reader.chat(chat)
    return await _answer(request, work, ChatFormat)


async def completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``."""
    state = request.app[STATE]
    body = await _read_body(request)
    work = await _off_loop(body, lambda: state.reader.completion(decode_request(body, CompletionRequest)))
    return await _answer(request, work, CompletionFormat)


async def embeddings(request: web.Request) -> web.Response:
    """``POST /v1/embeddings``: the mean of a text's last hidden states, as a unit vector."""
    state = request.app[STATE]
    body = await _read_body(request)
    asked = decode_request(body, EmbeddingRequest)
    sequences = await _off_loop(body, lambda: state.reader.embedding(asked))
    _set_deadline(request, sequences)
    # As many at a time as the engine takes from one request: the others wait here, not in its queue.
    vectors = []
    for first in range(0, len(sequences), state.reader.most_sequences):
        vectors += await _pooled(request, sequences[first : first + state.reader.most_sequences])
    prompt_tokens = sum(sequence.num_prompt for sequence in sequences)
    return _json(embeddings_answer(vectors, state.model.name, prompt_tokens, asked.encoding_format == "base64"))


async def _pooled(request: web.Request, sequences: list[Sequence]) -> list[npt.NDArray[np.float32]]:
    engine = request.app[STATE].engine
    vectors: dict[int, npt.NDArray[np.float32]] = {}
    generation = engine.submit(sequences)
    try:
        async for index, output in _arrivals(request, generation):
            _raise_if_failed(request, sequences[index], output)
            if output.embedding is not None:
                vectors[index] = output.embedding
    finally:
        engine.release(sequences, generation)
    return [vectors[index] for index in range(len(sequences))]


async def tokenize(request: web.Request) -> web.Response:
    """``POST /tokenize``, as vLLM has it."""
    state = request.app[STATE]
    body = await _read_body(request)
    asked = decode_request(body, TokenizeRequest)
    return await asyncio.to_thread(_tokenized, state, asked)


def _tokenized(state: ServerState, asked: TokenizeRequest) -> web.Response:
    tokens = state.reader.tokens(asked)
    return _json(
        {
            "count": len(tokens),
            "max_model_len": state.model.max_context,
            "tokens": tokens,
            "token_strs": state.reader.token_texts(tokens) if asked.return_token_strs else None,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """``POST /detokenize``, as vLLM has it."""
    state = request.app[STATE]
    body = await _read_body(request)
    asked = decode_request(body, DetokenizeRequest)
    return _json({"prompt": await asyncio.to_thread(state.reader.detokenized, asked)})


async def _off_loop(body: bytes, read: Callable[[], Read]) -> Read:
    """A small body is read in place; a large one in a thread, so that nobody's stream waits for its tokenizer."""
    return read() if len(body) < _LARGE_BODY else await asyncio.to_thread(read)


async def _answer(
    request: web.Request, work: Work, make_format: type[ChatFormat] | type[CompletionFormat]
) -> web.StreamResponse:
    state = request.app[STATE]
    usage_added = work.stream and not work.include_usage and request.headers.get(_USAGE_HEADER) == "always"
    answer = make_format(work, state.model.name, state.fingerprint, state.model.text.token_bytes, work.include_usage)
    _set_deadline(request, work.sequences)
    _set_salt(request, work.sequences)
    generation = state.engine.submit(work.sequences)
    # Whatever ends this handler, a client that left included, ends the sequences before the next step.
    try:
        if work.stream:
            return await _stream(request, work, answer, generation, usage_added)
        return await _collect(request, work, answer, generation)
    finally:
        state.engine.release(work.sequences, generation)


def _set_deadline(request: web.Request, sequences: list[Sequence]) -> None:
    """Sets how long the caller, or the server for all, waits: counted from when the body has arrived."""
    seconds = min(_asked_seconds(request), request.app[STATE].max_seconds or math.inf)
    if seconds < math.inf:
        deadline = time.monotonic() + seconds
        for sequence in sequences:
            sequence.deadline = deadline


def _set_salt(request: web.Request, sequences: list[Sequence]) -> None:
    """Keeps the KV blocks of one tenant from others, who could tell by time, and by usage, what has been asked before.

    Tenants are told apart by the credentials that came with the request, as a gateway passes them on, and by the
    namespace that a gateway gives them.
    """
    given = [f"{name}:{value}" for name in _TELL_TENANTS for value in request.headers.getall(name, ())]
    if given:
        salt = hashlib.blake2b("\0".join(given).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        for sequence in sequences:
            sequence.salt = salt


def _asked_seconds(request: web.Request) -> float:
    value = request.headers.get(_TIMEOUT_HEADER)
    if value is None:
        return math.inf
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_TIMEOUT:
        raise InvalidRequest(
            f"{_TIMEOUT_HEADER}: expected seconds, more than 0 and at most {_LONGEST_TIMEOUT:.0f}", _TIMEOUT_HEADER
        )
    return seconds


async def _collect(
    request: web.Request, work: Work, answer: AnswerFormat, generation: Generation
) -> web.StreamResponse:
    outputs: list[list[Output]] = [[] for _ in work.sequences]
    async for index, output in _arrivals(request, generation):
        _raise_if_failed(request, work.sequences[index], output)
        outputs[index].append(output)
    return _json(answer.whole(outputs))


async def _stream(
    request: web.Request, work: Work, answer: AnswerFormat, generation: Generation, usage_added: bool
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    if usage_added:
        response.headers[_USAGE_HEADER] = "added"
    # Headers wait for the first token: until then a failure can still be an honest status.
    events = _events(request, work, answer, generation, usage_added)
    first = await anext(events)
    await response.prepare(request)
    try:
        await _send(response, first)
        async for event in events:
            await _send(response, event)
    except RequestError as error:
        # The status has been sent: an error event, and no [DONE], say that the answer is not whole.
        await _send(response, _event(error.answer()))
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except TimeoutError:
        logger.warning("a reader took nothing for %.0f s and was cut off", SEND_TIMEOUT_SECONDS)
        if request.transport is not None:
            request.transport.abort()
        return response
    except Exception:
        logger.exception("unexpected failure in a stream")
        await _send(response, _event(UNEXPECTED.answer()))
    await response.write_eof()
    return response


async def _events(
    request: web.Request, work: Work, answer: AnswerFormat, generation: Generation, usage_added: bool
) -> AsyncIterator[bytes]:
    """The body of a stream, in pieces worth sending together."""
    opening = b"".join(map(_event, answer.opening()))
    while generation.unfinished:
        arrived: dict[int, list[Output]] = {}
        for index, output in await _take(request, generation):
            _raise_if_failed(request, work.sequences[index], output)
            arrived.setdefault(index, []).append(output)
        chunks = [chunk for index in sorted(arrived) for chunk in answer.chunks(index, arrived[index])]
        if chunks or opening:
            yield opening + b"".join(map(_event, chunks))
            opening = b""
    usage = _event(answer.usage_chunk()) if work.include_usage or usage_added else b""
    yield usage + b"data: [DONE]\n\n"


async def _arrivals(request: web.Request, generation: Generation) -> AsyncIterator[tuple[int, Output]]:
    while generation.unfinished:
        for item in await _take(request, generation):
            yield item


async def _take(request: web.Request, generation: Generation) -> list[tuple[int, Output]]:
    arrived = await generation.take()
    started = request.get(_STARTED)
    if started is not None and any(output.num_generated or output.embedding is not None for _, output in arrived):
        request[_STARTED] = None  # the first token is noted once
        request.app[STATE].metrics.first_token_seconds.observe(time.perf_counter() - started)
    return arrived


def _raise_if_failed(request: web.Request, sequence: Sequence, output: Output) -> None:
    constraint = sequence.constraint
    if output.finish_reason is not None and isinstance(constraint, GrammarConstraint) and constraint.error:
        # The caller's schema is at fault, and another try would end the same way.
        raise InvalidRequest(f"response_format or tools: too complex to follow: {constraint.error}", "response_format")
    match output.finish_reason:
        case FinishReason.EXPIRED:
            raise DeadlineExceeded(output.error or "the request's deadline passed")
        case FinishReason.SHED:
            raise Unavailable(output.error or NOT_RUNNING)
        case FinishReason.FAILED:
            if not request.app[STATE].engine.alive:
                raise Unavailable(NOT_RUNNING)
            raise GenerationFailed(output.error or "the engine failed while it worked on this request; try again")


async def _send(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
        await response.write(data)


def _event(value: Answer | ErrorAnswer) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _read_body(request: web.Request) -> bytes:
    request[_STARTED] = time.perf_counter()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"the body is over the limit of {MAX_BODY_BYTES} bytes") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest(
            "the body cannot be read: it ends early, or does not fit its Content-Encoding or Transfer-Encoding"
        ) from error
    except TimeoutError as error:
        raise _SlowSender(f"the body did not arrive within {BODY_TIMEOUT_SECONDS:.0f} s") from error


class _SlowSender(RequestError):
    status = 408


async def list_models(request: web.Request) -> web.Response:
    """``GET /v1/models``."""
    return _json({"object": "list", "data": [_model_object(request.app[STATE])]})


async def get_model(request: web.Request) -> web.Response:
    """``GET /v1/models/{id}``."""
    state = request.app[STATE]
    if request.match_info["model"] != state.model.name:
        raise ModelNotFound(f"no such model here; this server has '{state.model.name}'", "model")
    return _json(_model_object(state))


def _model_object(state: ServerState) -> dict[str, object]:
    return {"id": state.model.name, "object": "model", "created": state.created, "owned_by": "keepgate"}


async def model_info(request: web.Request) -> web.Response:
    """``GET /v1/model/info``: how the model is computed, for those who compare answers."""
    state = request.app[STATE]
    return _json(describe(state.model, state.engine.engine.stats()))


async def health(request: web.Request) -> web.Response:
    """``GET /health``: whether the process works."""
    if not request.app[STATE].engine.alive:
        raise Unavailable(NOT_RUNNING)
    return _json({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """``GET /ready``: whether requests are taken. The server only listens when the model is warm."""
    if not request.app[STATE].engine.alive:
        raise Unavailable(NOT_RUNNING)
    return _json({"status": "ready", "model": request.app[STATE].model.name})


async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics`` for Prometheus."""
    return web.Response(body=request.app[STATE].metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves in OpenAI's form; none says more than its own message."""
    status = 499  # the client left, in nginx's numbering; only metrics see it
    try:
        response = await handler(request)
        status = response.status
        return response
    except RequestError as error:
        status = error.status
        return error_response(error)
    except web.HTTPException as error:
        answer = translated(error, request)
        status = answer.status
        return error_response(answer)
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception:
        status = 500
        # The traceback holds code, never a body.
        logger.exception("unexpected failure in a handler")
        return error_response(UNEXPECTED)
    finally:
        resource = request.match_info.route.resource
        endpoint = resource.canonical if resource is not None else "unknown"
        request.app[STATE].metrics.requests.labels(endpoint, str(status)).inc()


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
