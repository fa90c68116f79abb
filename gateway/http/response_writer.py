"""Writes a response body to a client that may read slowly, or not at all."""

import asyncio

from aiohttp import web

# Below this aiohttp's writer does not wait for the client.
_DRAIN_BYTES = 2**15


class ResponseWriter:
    """Writes the chunks of a started response; the client has `timeout` seconds to read each."""

    def __init__(self, request: web.BaseRequest, response: web.StreamResponse, timeout: float) -> None:
        self._request = request
        self._response = response
        self._timeout = timeout

    async def send(self, chunk: bytes) -> None:
        """Raises ConnectionError when the client is gone, or has been cut off because it does not read."""
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() + len(chunk) < _DRAIN_BYTES:
            await self._response.write(chunk)
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self._response.write(chunk)
        except TimeoutError as error:
            if transport is not None:
                transport.abort()
            raise ConnectionResetError("the client does not read") from error

    async def finish(self) -> None:
        """Raises what `send` raises."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._response.write_eof()
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read") from error
