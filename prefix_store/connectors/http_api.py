"""The HTTP interface of a connector's store: blocks for other engines, its state for operators and the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from prefix_store.connectors.options import Listening
from prefix_store.connectors.transfers import NO_NAMESPACE, PartNames
from prefix_store.frames.block_id import BlockId
from prefix_store.identity.tenants import Tenants
from prefix_store.store.chain import Chain
from prefix_store.store.open_store import OpenStore

_MAX_BYTES = 64 * 2**20
_MOST_TOKENS = 16 * 2**20


class Prompt(msgspec.Struct):
    """A prompt as an engine has it. ``POST /tokenize`` of vLLM gives the tokens."""

    tokens: list[int]
    cache_salt: str = ""


BlocksOf = Callable[[Prompt], list[BlockId]]
Describe = Callable[[], dict[str, Any]]


def token_blocks(block_size: int, tenants: Tenants, names: PartNames) -> BlocksOf:
    """Blocks by tokens and salt, as the scheduler's side names them and then a worker."""

    def blocks_of(prompt: Prompt) -> list[BlockId]:
        if prompt.cache_salt and not tenants.is_lasting:
            raise ValueError(
                "cache_salt: without a secret only the engine's scheduler can name the blocks of salted prompts; "
                "expected secret_file among the connector's options"
            )
        keys = tenants.keys([f"cache_salt:{prompt.cache_salt}"] if prompt.cache_salt else [])
        ids = np.asarray(prompt.tokens, dtype=np.int32)
        hashes = keys.keys_of(ids)
        chain = Chain(NO_NAMESPACE, keys.root, block_size)
        chain.extend(hashes, ids[: len(hashes) * block_size])
        return [names.of(block) for block in chain.blocks]

    return blocks_of


class StoreApi:
    """Handlers over one worker's store.

    Args:
        opened: the store.
        block_size: tokens in a block.
        blocks_of: the blocks that a prompt fills; OverflowError for a token that is none, ValueError
            where it cannot name them.
        describe: the state.
    """

    def __init__(self, opened: OpenStore, block_size: int, blocks_of: BlocksOf, describe: Describe) -> None:
        self._opened = opened
        self._block_size = block_size
        self._blocks_of = blocks_of
        self._describe = describe

    def application(self) -> web.Application:
        """To be served."""
        app = web.Application(client_max_size=_MAX_BYTES, middlewares=[_errors])
        app.add_routes(
            [
                web.get("/v1/prefix", self._state),
                web.delete("/v1/prefix", self._clear),
                web.post("/v1/prefix/lookup", self._lookup),
                web.post("/v1/prefix/pin", self._pin),
                web.post("/v1/prefix/unpin", self._unpin),
            ]
        )
        if self._opened.server is not None:
            app.add_routes(self._opened.server.routes())
        return app

    async def _state(self, request: web.Request) -> web.Response:
        """``GET /v1/prefix``."""
        return web.json_response(self._describe())

    async def _clear(self, request: web.Request) -> web.Response:
        """``DELETE /v1/prefix``: empties the tiers."""
        return web.json_response({"removed": await self._opened.store.clear()})

    async def _lookup(self, request: web.Request) -> web.Response:
        """``POST /v1/prefix/lookup``: which tokens of a prompt are where."""
        prompt, chain = await self._chain(request)
        location = await self._opened.store.locate(chain)
        return web.json_response(
            {
                "tokens": len(prompt.tokens),
                "block_size": self._block_size,
                "leading_tokens": {name: blocks * self._block_size for name, blocks in location.leading.items()},
                "engines": [
                    {
                        "names": [owner.name for owner in run.owners],
                        "codec": run.format.codec.name,
                        "from": run.first * self._block_size,
                        "to": run.until * self._block_size,
                    }
                    for run in location.peers
                ],
            }
        )

    async def _pin(self, request: web.Request) -> web.Response:
        """``POST /v1/prefix/pin``: keeps a prompt in the tiers until it is unpinned."""
        _, chain = await self._chain(request)
        return web.json_response({"pinned_tokens": self._tokens(await self._opened.store.pin(chain))})

    async def _unpin(self, request: web.Request) -> web.Response:
        """``POST /v1/prefix/unpin``: takes pins of a prompt back."""
        _, chain = await self._chain(request)
        return web.json_response({"unpinned_tokens": self._tokens(await self._opened.store.unpin(chain))})

    def _tokens(self, blocks: dict[str, int]) -> dict[str, int]:
        return {name: count * self._block_size for name, count in blocks.items()}

    async def _chain(self, request: web.Request) -> tuple[Prompt, list[BlockId]]:
        """The prompt in a request's body, and the blocks that it fills."""
        try:
            prompt = msgspec.json.decode(await request.read(), type=Prompt)
        except msgspec.DecodeError as error:
            raise _BadRequest(f"{error}; expected an object with tokens, a list of token ids") from error
        if len(prompt.tokens) > _MOST_TOKENS:
            raise _BadRequest(f"tokens: there are {len(prompt.tokens)}, expected {_MOST_TOKENS} at most")
        try:
            return prompt, self._blocks_of(prompt)
        except OverflowError as error:
            raise _BadRequest(f"tokens: {error}; expected numbers that fit in 32 bits") from error
        except ValueError as error:
            raise _BadRequest(str(error)) from error


class _BadRequest(ValueError):
    """The message is for the client."""


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except _BadRequest as error:
        return web.json_response({"error": {"message": str(error)}}, status=400)


@asynccontextmanager
async def serving(application: web.Application, at: Listening) -> AsyncIterator[None]:
    """Serves an application at a host and port.

    Raises:
        ValueError: the port cannot be opened.
    """
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, at.host, at.port).start()
        except OSError as error:
            raise ValueError(
                f"address: port {at.port} of {at.host} cannot be opened ({error.strerror or error}); expected a free "
                "port, and with listen a host of this machine"
            ) from error
        yield
    finally:
        await runner.cleanup()
