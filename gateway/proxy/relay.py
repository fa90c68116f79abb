"""Sends a flight's answer to one client."""

from aiohttp import web
from multidict import CIMultiDict

from cache.entries.key import Key
from cache.entries.outcomes import Bypass, Failed, Outcome
from gateway import metrics
from gateway.errors import GatewayError, UpstreamDisconnected, UpstreamUnreachable
from gateway.http.response_writer import ResponseWriter
from gateway.proxy.flight import Subscriber
from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.lookup import Lookup
from gateway.proxy.replay import render
from gateway.proxy.response_headers import forwarded_headers, semantic_headers, whole_response
from gateway.proxy.semantic_lookup import SemanticQuery


class Relay:
    """Writes a flight to the client's response. A client has `timeout` seconds to read each chunk."""

    def __init__(self, lookup: Lookup, timeout: float) -> None:
        self._lookup = lookup
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
    ) -> web.StreamResponse:
        """The client's response. Raises UpstreamError while it has not started."""
        await subscriber.started()
        flight = subscriber.flight
        if flight.status >= 500 and self._lookup.stale_if_error_hit(inference, outcome):
            raise UpstreamUnreachable(f"The upstream answered with status {flight.status}.")
        headers = forwarded_headers(flight.headers, outcome, key.id if flight.status == 200 else "", joined)
        headers.update(semantic_headers(query.reply))
        _count(inference.family, outcome)
        if joined and flight.status == 200 and flight.is_event_stream != inference.stream:
            return await self._convert(inference, subscriber, headers)
        # A JSON answer is sent whole, unless it is too long to be held.
        if not flight.is_event_stream and (body := await subscriber.body()) is not None:
            if flight.status == 200:
                return whole_response(request, headers, body)
            return web.Response(status=flight.status, body=body, headers=headers)
        return await self._stream(request, inference, subscriber, headers)

    async def _stream(
        self, request: web.BaseRequest, inference: InferenceRequest, subscriber: Subscriber, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=subscriber.flight.status, headers=headers)
        await response.prepare(request)
        writer = ResponseWriter(request, response, self._timeout)
        try:
            async for chunk in subscriber.chunks(with_usage=inference.include_usage):
                await writer.send(chunk)
        except GatewayError as error:
            if not subscriber.flight.is_event_stream:
                raise  # a JSON body has no place for an error: it is cut, so that no client takes it for complete
            metrics.errors.labels(error.label).inc()
            # The status line has been sent: the error goes into the stream.
            await writer.send(error.event())
        await writer.finish()
        return response

    async def _convert(
        self, inference: InferenceRequest, subscriber: Subscriber, headers: CIMultiDict[str]
    ) -> web.Response:
        """The flight has the other form (stream or JSON) than this client asked for: convert its recording."""
        await subscriber.finished()
        flight = subscriber.flight
        if flight.recording is None:
            raise UpstreamDisconnected(f"The upstream's answer is not whole: {flight.unstorable}.")
        headers["Content-Type"] = "text/event-stream" if inference.stream else "application/json"
        return web.Response(body=await render(flight.recording.body, inference.form), headers=headers)


def _count(family: str, outcome: Outcome) -> None:
    match outcome:
        case Bypass():
            kind = "bypass"
        case Failed():
            kind = "failed"
        case _:
            kind = "miss"
    metrics.requests.labels(family, kind, "none").inc()
