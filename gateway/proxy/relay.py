"""A flight's answer, on its way to one client."""

from aiohttp import web
from multidict import CIMultiDict

from cache.entries.key import Key
from cache.entries.outcomes import Bypass, Failed, Outcome
from gateway import metrics
from gateway.errors import GatewayError, UpstreamCut, UpstreamUnreachable
from gateway.http.sender import Sender
from gateway.proxy.call import Call
from gateway.proxy.flight import Passenger
from gateway.proxy.lookup import Lookup
from gateway.proxy.rendering import render
from gateway.proxy.response_headers import forwarded_headers, semantic_headers, whole_response
from gateway.proxy.semantic_lookup import Inquiry


class Relay:
    """Sends what a flight carries. `patience` is how many seconds a client may take to read a piece."""

    def __init__(self, lookup: Lookup, patience: float) -> None:
        self._lookup = lookup
        self._patience = patience

    async def answer(
        self,
        request: web.BaseRequest,
        call: Call,
        key: Key,
        outcome: Outcome,
        inquiry: Inquiry,
        passenger: Passenger,
        joined: bool,
    ) -> web.StreamResponse:
        """The client's response. Raises UpstreamError while it has not started."""
        await passenger.started()
        flight = passenger.flight
        if flight.status >= 500 and self._lookup.stand_in(call, outcome):
            raise UpstreamUnreachable(f"The upstream answered with status {flight.status}.")
        headers = forwarded_headers(flight.headers, outcome, key.id, joined)
        headers.update(semantic_headers(inquiry.reply))
        _count(call.family, outcome)
        if joined and flight.status == 200 and flight.is_event_stream != call.stream:
            return await self._convert(call, passenger, headers)
        # An answer in one piece is sent in one piece, unless it is too long to be held.
        if not flight.is_event_stream and (body := await passenger.body()) is not None:
            if flight.status == 200:
                return whole_response(request, headers, body)
            return web.Response(status=flight.status, body=body, headers=headers)
        return await self._stream(request, call, passenger, headers)

    async def _stream(
        self, request: web.BaseRequest, call: Call, passenger: Passenger, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=passenger.flight.status, headers=headers)
        await response.prepare(request)
        sender = Sender(request, response, self._patience)
        try:
            async for piece in passenger.pieces(with_usage=call.include_usage):
                await sender.send(piece)
        except GatewayError as error:
            if not passenger.flight.is_event_stream:
                raise  # nothing can be said within it: it is cut, so that nobody takes it for whole
            metrics.errors.labels(error.label).inc()
            # The status line is long gone: what can still be said is said within the stream.
            await sender.send(error.event())
        await sender.finish()
        return response

    async def _convert(self, call: Call, passenger: Passenger, headers: CIMultiDict[str]) -> web.Response:
        """The flight carries the other shape, stream or whole, than this client wants."""
        await passenger.landed()
        flight = passenger.flight
        if flight.recording is None:
            raise UpstreamCut(f"The upstream's answer is not whole: {flight.unstorable}.")
        headers["Content-Type"] = "text/event-stream" if call.stream else "application/json"
        return web.Response(body=await render(flight.recording.body, call.form), headers=headers)


def _count(family: str, outcome: Outcome) -> None:
    match outcome:
        case Bypass():
            kind = "bypass"
        case Failed():
            kind = "failed"
        case _:
            kind = "miss"
    metrics.requests.labels(family, kind, "none").inc()
