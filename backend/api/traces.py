"""The engine's part of a trace: a span of each request, of its steps, and of what the prefix store does for it."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many

from aiohttp import web
from multidict import CIMultiDict

from backend.engine.sequence import Sequence
from telemetry.tracing.span import NO_SPAN, Span, Tracing, Value
from telemetry.tracing.timed import timed, timings_of

_TRACE: web.RequestKey[Span] = web.RequestKey("_TRACE", Span)
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
"""``gen_ai.operation.name`` by path; no other request has a trace."""


def begin_trace(tracing: Tracing, request: web.Request, model: str) -> Span:
    """The span of a request that runs the model, by the caller's ``traceparent``."""
    operation = _OPERATIONS.get(request.path)
    if operation is None:
        return NO_SPAN
    span = timed(tracing.begin(request.headers, f"{operation} {model}"), request.headers, time.monotonic())
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


def tell_timings(request: web.Request, headers: CIMultiDict[str]) -> None:
    """Adds the durations of a request so far to its response's headers, if it asked for them."""
    if (timings := timings_of(trace_of(request))) is not None:
        timings.tell(headers)


def record_prompt(span: Span, sequences: Many[Sequence], ended: float) -> None:
    """Records the waiting and prefill of a request's sequences, at their first token, or at their end without one.

    Args:
        ended: ``time.monotonic()`` seconds.
    """
    queued = [sequence.queued_at for sequence in sequences if sequence.queued_at]
    if not span.is_recorded or not queued:
        return
    started = min((s.started_at for s in sequences if s.started_at is not None), default=None)
    span.record("engine.queue", min(queued), ended if started is None else started)
    if started is not None:
        prompts = {tuple(sequence.tokens[: sequence.num_prompt]) for sequence in sequences}
        cached = max(sequence.num_cached for sequence in sequences)
        tokens: dict[str, Value] = {"keepgate.prompt_tokens": sum(map(len, prompts)), "keepgate.cached_tokens": cached}
        span.record("engine.prefill", started, ended, tokens)
        span.set({"gen_ai.usage.input_tokens": sum(map(len, prompts))})


def record_answer(span: Span, sequences: Many[Sequence], first_token_at: float | None, ended: float) -> None:
    """Records the decoding of a request's sequences, which have ended.

    Args:
        first_token_at, ended: ``time.monotonic()`` seconds; None: there was no token.
    """
    if not span.is_recorded or not any(sequence.queued_at for sequence in sequences):
        return
    generated = sum(sequence.num_generated for sequence in sequences)
    if first_token_at is None:
        record_prompt(span, sequences, ended)
    elif generated:
        span.record("engine.decode", first_token_at, ended, {"keepgate.generated_tokens": generated})
    reasons = [sequence.finish_reason.value for sequence in sequences if sequence.finish_reason is not None]
    span.set({"gen_ai.usage.output_tokens": generated, "gen_ai.response.finish_reasons": reasons})
