"""The engine's part of a trace: a span of each request, of its steps, and of what the prefix store does for it."""

from __future__ import annotations

from collections.abc import Sequence as Many

from aiohttp import web

from backend.engine.sequence import Sequence
from telemetry.tracing.span import NO_SPAN, Span, Tracing, Value

_TRACE: web.RequestKey[Span] = web.RequestKey("_TRACE", Span)
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
"""``gen_ai.operation.name`` by path; no other request has a trace."""


def begin_trace(tracing: Tracing, request: web.Request, model: str) -> Span:
    """The span of a request that runs the model, by the caller's ``traceparent``."""
    operation = _OPERATIONS.get(request.path)
    if operation is None:
        return NO_SPAN
    span = tracing.begin(request.headers, f"{operation} {model}")
    if span.is_recorded:
        span.set(
            {
                "http.request.method": request.method,
                "url.path": request.path,
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "keepgate",
                "gen_ai.request.model": model,
            }
        )
        request[_TRACE] = span
    return span


def end_trace(span: Span, status: int) -> None:
    """Ends the span of a request."""
    span.set({"http.response.status_code": status})
    if status >= 400:
        span.fail(str(status))
    span.end()


def trace_of(request: web.Request) -> Span:
    """The span of a request; one that records nothing if it has none."""
    span = request.get(_TRACE)
    return NO_SPAN if span is None else span


def record_steps(span: Span, sequences: Many[Sequence], first_token_at: float | None, ended: float) -> None:
    """Records the waiting, prefill and decoding of a request's sequences, which have ended.

    Args:
        first_token_at, ended: ``time.monotonic()`` seconds; None: there was no token.
    """
    queued = [sequence.queued_at for sequence in sequences if sequence.queued_at]
    if not span.is_recorded or not queued:
        return
    started = min((s.started_at for s in sequences if s.started_at is not None), default=None)
    generated = sum(sequence.num_generated for sequence in sequences)
    span.record("engine.queue", min(queued), ended if started is None else started)
    if started is not None:
        prompts = {tuple(sequence.tokens[: sequence.num_prompt]) for sequence in sequences}
        cached = max(sequence.num_cached for sequence in sequences)
        tokens: dict[str, Value] = {"keepgate.prompt_tokens": sum(map(len, prompts)), "keepgate.cached_tokens": cached}
        span.record("engine.prefill", started, ended if first_token_at is None else first_token_at, tokens)
        span.set({"gen_ai.usage.input_tokens": sum(map(len, prompts))})
    if first_token_at is not None and generated:
        span.record("engine.decode", first_token_at, ended, {"keepgate.generated_tokens": generated})
    reasons = [sequence.finish_reason.value for sequence in sequences if sequence.finish_reason is not None]
    span.set({"gen_ai.usage.output_tokens": generated, "gen_ai.response.finish_reasons": reasons})
