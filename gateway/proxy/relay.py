"""Sends a flight's answer to one client."""

import time
from collections.abc import Mapping

from aiohttp import web
from multidict import CIMultiDict

from cache.entries.key import Key
from cache.entries.outcomes import Bypass, Failed, Outcome
from cache.errors import UnstorableAnswer
from gateway import metrics
from gateway.errors import GatewayError, UpstreamDisconnected, UpstreamUnreachable, refusal
from gateway.http.response_writer import ResponseWithTrailers, ResponseWriter
from gateway.http.sse import EventSplitter, event_data, event_json
from gateway.proxy.conversations import ConversationKeeper
from gateway.proxy.flight import Flight, Subscriber
from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.lookup import ASKING_FOR_NEW, Lookup
from gateway.proxy.rendering import render
from gateway.proxy.response_headers import (
    COST_HEADERS,
    IGNORED_HEADER,
    MODEL_HEADER,
    content_type,
    cost_headers,
    forwarded_headers,
    semantic_headers,
    whole_response,
)
from gateway.proxy.semantic_lookup import SemanticQuery
from gateway.surfaces.openai import CHAT, COMPLETIONS
from gateway.surfaces.surface import Json, TranslatedForm
from gateway.telemetry.record import RECORD, RequestRecord
from gateway.upstreams.upstream import NO_HEADERS
from telemetry.tracing.timed import SERVER_TIMING, timings_of


class Relay:
    """Writes a flight to the client's response. A client has `timeout` seconds to read each chunk."""

    def __init__(self, lookup: Lookup, conversations: ConversationKeeper, timeout: float) -> None:
        self._lookup = lookup
        self._conversations = conversations
        self._timeout = timeout

    async def answer(
        self,
        request: web.BaseRequest,
        inference: InferenceRequest,
        key: Key,
        outcome: Outcome,
        query: SemanticQuery,
        subscriber: Subscriber,
        joined: bool,
        limits: Mapping[str, str] = NO_HEADERS,
    ) -> web.StreamResponse:
        """The client's response; `limits` are headers of what is left to its caller.

        Raises UpstreamError while it has not started.
        """
        record, flight = request[RECORD], subscriber.flight
        with record.span.span("upstream.first_byte"):
            await subscriber.started()
        if flight.status >= 500 and self._lookup.stale_if_error_hit(inference, outcome):
            raise UpstreamUnreachable(f"The upstream answered with status {flight.status}.")
        if flight.status == 200 and (not isinstance(outcome, Bypass) or outcome.reason in ASKING_FOR_NEW):
            record.entry = key.id
        headers = forwarded_headers(flight.headers, outcome, record.entry, joined)
        timings = timings_of(record.span)
        if SERVER_TIMING in headers and (joined or timings is not None):
            told = headers.popall(SERVER_TIMING)
            if timings is not None and not joined:  # else they are of another request
                timings.take(told)
        headers.update(semantic_headers(query.reply))
        headers.update(limits)
        if (model := flight.model or inference.model) != inference.named:
            headers[MODEL_HEADER] = model
        record.cache, record.first_byte_at = _count(inference.family, outcome), time.monotonic()
        if isinstance(outcome, Bypass | Failed):
            record.reason = outcome.reason
        own = flight.form is inference.surface
        if not own and (unsent := inference.asked.unsent):
            headers.add(IGNORED_HEADER, ", ".join(unsent))
        if flight.status != 200 and not own:
            return await self._convert_error(inference, subscriber, headers)
        if (
            flight.status == 200
            and not own
            and flight.is_stream
            and inference.stream
            and flight.form in (CHAT, COMPLETIONS)
        ):
            return await self._translate(request, inference, subscriber, headers, joined)
        if flight.status == 200 and (not own or (joined and flight.is_stream != inference.stream)):
            with record.span.span("upstream.body"):
                await subscriber.finished()
            return await self._convert(inference, subscriber, headers, joined)
        # An answer that is not streamed is sent whole, unless it is too long to be held, or can be heard as it comes.
        is_heard = flight.content_type.startswith("audio/")
        if not flight.is_stream and not is_heard:
            began = time.monotonic()
            body = await subscriber.body()
            if body is not None:
                record.span.record("upstream.body", began, time.monotonic())
            if body is not None and flight.status == 200:
                headers.update(cost_headers(flight.charge, joined))
                return whole_response(request, headers, body)
            if body is not None:
                return web.Response(status=flight.status, body=body, headers=headers)
        return await self._stream(request, inference, subscriber, headers, joined)

    async def _stream(
        self,
        request: web.BaseRequest,
        inference: InferenceRequest,
        subscriber: Subscriber,
        headers: CIMultiDict[str],
        joined: bool,
    ) -> web.StreamResponse:
        record = request[RECORD]
        response = ResponseWithTrailers(request, headers, subscriber.flight.status, _trailers(record))
        await response.prepare(request)
        writer = ResponseWriter(request, response, self._timeout)
        try:
            await subscriber.send_to(writer, with_usage=inference.include_usage)
        except GatewayError as error:
            if not subscriber.flight.is_stream:
                raise  # a JSON body has no place for an error: it is cut, so that no client takes it for complete
            metrics.errors.labels(error.label).inc()
            # The status line has been sent: the error goes into the stream.
            await writer.send(inference.surface.error_event(error))
        response.end(_end_of(record, subscriber.flight, joined))
        await writer.finish()
        return response

    async def _translate(
        self,
        request: web.BaseRequest,
        inference: InferenceRequest,
        subscriber: Subscriber,
        headers: CIMultiDict[str],
        joined: bool,
    ) -> web.StreamResponse:
        """Stream chunks of a chat completion in the client's form of API, as they arrive."""
        surface = inference.surface
        assert isinstance(surface, TranslatedForm)  # noqa: S101  # what has its own form is not translated
        headers["Content-Type"] = surface.stream_type
        record = request[RECORD]
        response = ResponseWithTrailers(request, headers, 200, _trailers(record))
        await response.prepare(request)
        writer = ResponseWriter(request, response, self._timeout)
        translator = surface.translator(inference.asked, inference.key.id)  # as a later hit is rendered
        splitter = EventSplitter()
        has_begun = has_ended = False
        try:
            async for data in subscriber.chunks(with_usage=True):
                translated = bytearray()
                try:
                    for event in splitter.feed(data):
                        if (chunk := _chunk(event)) is not None:
                            has_begun = has_begun or bool(chunk["choices"])
                            has_ended = has_ended or _is_last(chunk)
                            translated += translator.add(chunk)
                finally:  # what came before an error is sent before it
                    if translated:
                        await writer.send(bytes(translated))
            # A client of chat completions sees what is missing; another would get the end of an answer that has none.
            if not has_begun or not (has_ended or subscriber.flight.complete):
                raise UpstreamDisconnected("The upstream's answer is not whole: the stream ended early.")
            end = translator.finish()
            await self._conversations.keep(inference, translator.answer)
            await writer.send(end)
        except GatewayError as error:
            metrics.errors.labels(error.label).inc()
            await writer.send(surface.error_event(error))
        response.end(_end_of(record, subscriber.flight, joined))
        await writer.finish()
        return response

    async def _convert(
        self, inference: InferenceRequest, subscriber: Subscriber, headers: CIMultiDict[str], joined: bool
    ) -> web.Response:
        """The flight, which has finished, has another form than this client asked for: convert its recording."""
        flight = subscriber.flight
        body = flight.recording.body if flight.recording is not None else None
        if body is None and not flight.is_stream and flight.form is not inference.surface:
            body = await subscriber.body()  # it is not stored, but is what this client's own call would have brought
        try:
            if body is None:
                raise UnstorableAnswer(flight.unstorable or "it ended early")
            rendered = await render(body, flight.form.family, inference)
        except UnstorableAnswer as reason:
            raise UpstreamDisconnected(f"The upstream's answer is not whole: {reason}.") from reason
        if rendered.answer is not None:
            await self._conversations.keep(inference, rendered.answer)
        headers["Content-Type"] = content_type(inference.form)
        headers.update(cost_headers(flight.charge, joined))
        return web.Response(body=rendered.body, headers=headers)

    async def _convert_error(
        self, inference: InferenceRequest, subscriber: Subscriber, headers: CIMultiDict[str]
    ) -> web.Response:
        """The upstream refused, in another form of API than the client's."""
        status = subscriber.flight.status
        if status < 400:  # no client takes it for an error, nor can its body be read as an answer
            raise UpstreamDisconnected(f"The upstream answered with status {status} in place of an answer.")
        error = refusal(status, await subscriber.body() or b"")
        headers["Content-Type"] = "application/json"
        return web.Response(status=status, body=inference.surface.error_body(error), headers=headers)


def _trailers(record: RequestRecord) -> str:
    """The names of the fields that may follow a stream."""
    return COST_HEADERS if timings_of(record.span) is None else f"{COST_HEADERS}, {SERVER_TIMING}"


def _end_of(record: RequestRecord, flight: Flight, joined: bool) -> dict[str, str]:
    """The fields that follow a stream."""
    fields = cost_headers(flight.charge, joined)
    if (timings := timings_of(record.span)) is not None:
        record.span.record("upstream.body", record.first_byte_at, time.monotonic())
        timings.tell(fields)
    return fields


def _chunk(event: bytes) -> Json | None:
    """The chunk in an event; None if there is none.

    Raises UpstreamRefused for an error within the stream, and UpstreamDisconnected for what is no chunk.
    """
    data = event_data(event)
    if not data or data == b"[DONE]":
        return None
    try:
        chunk = event_json(data)
    except ValueError as fault:
        raise UpstreamDisconnected("The upstream's stream holds something else than chunks.") from fault
    if chunk.get("error") is not None:
        raise refusal(502, data)
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise UpstreamDisconnected("The upstream's stream has a chunk without a list of choices.")
    return chunk


def _is_last(chunk: Json) -> bool:
    """Whether nothing follows for the first choice, but for the usage."""
    return any(choice.get("index", 0) == 0 and choice.get("finish_reason") is not None for choice in chunk["choices"])


def _count(family: str, outcome: Outcome) -> str:
    match outcome:
        case Bypass():
            kind = "bypass"
        case Failed():
            kind = "failed"
        case _:
            kind = "miss"
    metrics.requests.labels(family, kind, "none").inc()
    return kind
