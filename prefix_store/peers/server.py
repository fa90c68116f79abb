"""The server side."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import hdrs, web

from prefix_store.peers.protocol import (
    EPOCH_HEADER,
    FRAMES_TYPE,
    MAX_REQUEST_BYTES,
    PATH,
    BlocksRequest,
)

_MAX_REQUESTS = 4
_MAX_ANSWER_BYTES = 2**30
_REQUEST_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
_BEARER = "Bearer "


class FrameSource(Protocol):
    """A store of frames: a tier."""

    async def frame(self, key: bytes, parent: bytes) -> bytes | None:
        """A verified frame, by its stored keys; None if there is none."""


class BlockServer:
    """Routes that send frames to clients that have the secret and the keys. They never list keys.

    At most four answers are sent at a time, each of at most 1 GiB and 60 s, with about two frames in memory; further
    requests get status 503.

    Args:
        sources: in search order.
        secret: shared by all engines.
        epoch: of this process; another one after each restart.

    Raises:
        ValueError: the secret is empty: any client could read every tenant's blocks.
    """

    def __init__(self, sources: Sequence[FrameSource], secret: str, epoch: str) -> None:
        if not secret:
            raise ValueError("the secret of the peers is empty, expected one; without a secret no blocks are served")
        self._sources = tuple(sources)
        self._secret = secret.encode()
        self._epoch = epoch
        self._slots = asyncio.Semaphore(_MAX_REQUESTS)
        self._decoder = msgspec.msgpack.Decoder(BlocksRequest)
        self.answers: Counter[int] = Counter()
        """By status."""
        self.frames = 0
        self.bytes = 0

    def routes(self) -> list[web.RouteDef]:
        """To be added to an application."""
        return [web.post(PATH, self.answer)]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers a POST on the path of these routes."""
        response = await self._answer(request)
        self.answers[response.status] += 1
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if not self._is_known(request.headers.get(hdrs.AUTHORIZATION, "")):
            return self._refusal(401, "The token is missing or another one.")
        if (request.content_length or 0) > MAX_REQUEST_BYTES or request.content_length is None:
            return self._refusal(413, f"The request must have a length of at most {MAX_REQUEST_BYTES} bytes.")
        if self._slots.locked():
            return self._refusal(503, "Too many others are being answered.")
        async with self._slots:
            return await self._give(request)

    async def _give(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                asked = self._decoder.decode(await request.read())
        except TimeoutError:
            return self._refusal(408, "The request took too long.")
        except ConnectionError:
            return self._refusal(400, "The request broke off.")  # the client has disconnected
        except msgspec.DecodeError as error:
            return self._refusal(400, f"The request is no list of blocks: {error}.")
        if asked.epoch != self._epoch:
            return self._refusal(409, "This engine has been restarted.")
        response = web.StreamResponse(headers={EPOCH_HEADER: self._epoch, hdrs.CONTENT_TYPE: FRAMES_TYPE})
        response.enable_chunked_encoding()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await response.prepare(request)
                await self._send(asked, response)
        except (TimeoutError, ConnectionError):
            # The status is sent already: only a broken connection shows that the answer is incomplete.
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _send(self, asked: BlocksRequest, response: web.StreamResponse) -> None:
        sent = 0
        for key, parent in asked.blocks:
            frame = await self._find(key, parent)
            if frame is None or sent + len(frame) > _MAX_ANSWER_BYTES:
                break
            await response.write(frame)
            sent += len(frame)
            self.frames += 1
            self.bytes += len(frame)
        await response.write_eof()

    async def _find(self, key: bytes, parent: bytes) -> bytes | None:
        for source in self._sources:
            if (frame := await source.frame(key, parent)) is not None:
                return frame
        return None

    def _is_known(self, authorization: str) -> bool:
        given = authorization[len(_BEARER) :] if authorization.startswith(_BEARER) else ""
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._secret)

    def _refusal(self, status: int, why: str) -> web.Response:
        return web.json_response({"error": {"message": why}}, status=status, headers={EPOCH_HEADER: self._epoch})
