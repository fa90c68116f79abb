"""A flight's answer, on its way to one client."""

import asyncio

from aiohttp import web
from multidict import CIMultiDict

from cache.key import Key
from cache.results import Bypass, Failed, Outcome
from gateway import metrics
from gateway.call import Call
from gateway.errors import GatewayError, UpstreamCut, UpstreamUnreachable
from gateway.flight import Passenger
from gateway.lookup import Lookup
from gateway.rendering import render
from gateway.replies import forwarded_headers


class Relay:
    """Sends what a flight carries. `patience` is how many seconds a client may take to read a piece."""

    def __init__(self, lookup: Lookup, patience: float) -> None:
        self._lookup = lookup
        self._patience = patience

    async def answer(
        self, request: web.BaseRequest, call: Call, key: Key, outcome: Outcome, passenger: Passenger, joined: bool
    ) -> web.StreamResponse:
        """The client's response. Raises UpstreamError while it has not started."""
        await passenger.started()
        flight = passenger.flight
        if flight.status >= 500 and self._lookup.stand_in(call, outcome):
            raise UpstreamUnreachable(f"The upstream answered with status {flight.status}.")
        headers = forwarded_headers(flight.headers, outcome, key.id, joined)
        _count(call.family, outcome)
        if joined and flight.status == 200 and flight.is_event_stream != call.stream:
            return await self._convert(call, passenger, headers)
        if flight.is_event_stream:
            return await self._stream(request, call, passenger, headers)
        return web.Response(status=flight.status, body=await passenger.body(), headers=headers)

    async def _stream(
        self, request: web.BaseRequest, call: Call, passenger: Passenger, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=passenger.flight.status, headers=headers)
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as deadline:
                async for piece in passenger.pieces(with_usage=call.include_usage):
                    deadline.reschedule(loop.time() + self._patience)
                    await response.write(piece)
                    deadline.reschedule(None)
        except GatewayError as error:
            # The status line is long gone: what can still be said is said within the stream.
            metrics.errors.labels(error.code or "").inc()
            await response.write(error.event())
        except TimeoutError:
            # A client that no longer reads. Nothing more can be told to it.
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
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
