"""Sending to a client that may read slowly, or not at all."""

import asyncio

from aiohttp import web

# Below this aiohttp's writer does not wait for the client.
_UNWAITED_BYTES = 2**15


class Sender:
    """Sends a started response piece by piece; a client gets `patience` seconds to make room for each."""

    def __init__(self, request: web.BaseRequest, response: web.StreamResponse, patience: float) -> None:
        self._request = request
        self._response = response
        self._patience = patience

    async def send(self, piece: bytes) -> None:
        """Raises ConnectionError when the client is gone, or has been cut off because it does not read."""
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() + len(piece) < _UNWAITED_BYTES:
            await self._response.write(piece)
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._response.write(piece)
        except TimeoutError as error:
            if transport is not None:
                transport.abort()
            raise ConnectionResetError("the client does not read") from error

    async def finish(self) -> None:
        """Raises what `send` raises."""
        try:
            async with asyncio.timeout(self._patience):
                await self._response.write_eof()
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read") from error
