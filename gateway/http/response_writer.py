"""Writes a response body to a client that may read slowly, or not at all."""

import asyncio
from collections.abc import Mapping

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

# Below this aiohttp's writer does not wait for the client.
_DRAIN_BYTES = 2**15


class ResponseWithTrailers(web.StreamResponse):
    """A response with fields after its body, for a client that reads such (RFC 9110, section 6.5)."""

    def __init__(self, request: web.BaseRequest, headers: CIMultiDict[str], status: int, trailers: str) -> None:
        """`trailers` are the names of the fields that may follow."""
        accepted = {word.strip().lower() for line in request.headers.getall("TE", ()) for word in line.split(",")}
        self._reads_trailers = "trailers" in accepted and request.version == HttpVersion11
        if self._reads_trailers:
            headers["Trailer"] = trailers
        super().__init__(status=status, headers=headers)
        self._request = request
        self._has_ended = False

    async def write_eof(self, data: bytes = b"") -> None:
        """End the body."""
        if not self._has_ended:
            await super().write_eof(data)

    def end(self, trailers: Mapping[str, str]) -> None:
        """End the body with these fields, if the client reads any."""
        transport = self._request.transport
        if not (trailers and self._reads_trailers) or transport is None:
            return
        # aiohttp writes no trailers: this is the whole end of a chunked body (RFC 9112, section 7.1.2).
        fields = "".join([f"{name}: {value}\r\n" for name, value in trailers.items()])
        transport.write(f"0\r\n{fields}\r\n".encode())
        self._has_ended = True


class ResponseWriter:
    """Writes the chunks of a started response; the client has `timeout` seconds to read each."""

    __slots__ = ("_is_chunked", "_request", "_response", "_timeout")

    def __init__(self, request: web.BaseRequest, response: web.StreamResponse, timeout: float) -> None:
        self._request = request
        self._response = response
        self._timeout = timeout
        self._is_chunked = response.headers.get("Transfer-Encoding") == "chunked"

    def offer(self, chunk: bytes) -> bool:
        """Write a chunk unless that might take waiting for the client. Returns whether it has been written."""
        if not chunk:
            return True
        transport = self._request.transport
        if (
            not self._is_chunked
            or transport is None
            or transport.is_closing()
            or transport.get_write_buffer_size() + len(chunk) >= _DRAIN_BYTES
        ):
            return False
        # aiohttp's own writer takes three coroutines to do this (RFC 9112, section 7.1).
        transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    async def send(self, chunk: bytes) -> None:
        """Raises ConnectionError when the client is gone, or has been cut off because it does not read."""
        if self.offer(chunk):
            return
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
