"""Endpoints for operators: what the prefix store holds, where a prompt is, and what is to stay or to go."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from aiohttp import web

from backend.api.http_body import json_response, read_body
from backend.api.prefix_store import forget_all
from backend.api.request_headers import tenant_keys
from backend.api.server_state import STATE, ServerState
from backend.engine.model_runner import BLOCK_SIZE
from backend.errors import NotFound
from backend.prefixes.sharing import PrefixLocation
from backend.protocol import TokenizeRequest, decode_request
from prefix_store.store.description import describe_store
from prefix_store.store.open_store import OpenStore


async def prefix_blocks(request: web.Request) -> web.StreamResponse:
    """``POST /v1/prefix/blocks``: KV blocks by their hashes, for other engines that know the secret."""
    server = _opened(request).server
    if server is None:
        raise NotFound("this engine gives no KV blocks to others: it has no index, or no secret")
    return await server.answer(request)


async def describe_prefixes(request: web.Request) -> web.Response:
    """``GET /v1/prefix``: what there is, what it has saved, and what was decided."""
    return json_response(describe_engine_store(request.app[STATE], _opened(request)))


async def look_up_prefix(request: web.Request) -> web.Response:
    """``POST /v1/prefix/lookup``: which tokens of the caller's prompt are where. Takes what ``/tokenize`` takes."""
    tokens, found = await _find(request)
    return json_response(
        {
            "tokens": tokens,
            "block_size": BLOCK_SIZE,
            "leading_tokens": {
                "device": found.in_pool * BLOCK_SIZE,
                **{name: blocks * BLOCK_SIZE for name, blocks in found.location.leading.items()},
            },
            "engines": [
                {
                    "names": [owner.name for owner in run.owners],
                    "codec": run.format.codec.name,
                    "from": run.first * BLOCK_SIZE,
                    "to": run.until * BLOCK_SIZE,
                }
                for run in found.location.peers
            ],
        }
    )


async def pin_prefix(request: web.Request) -> web.Response:
    """``POST /v1/prefix/pin``: keeps the caller's prompt in the tiers until it is unpinned."""
    _, found = await _find(request)
    pinned = await _opened(request).store.pin(found.chain.blocks)
    return json_response({"pinned_tokens": {name: blocks * BLOCK_SIZE for name, blocks in pinned.items()}})


async def unpin_prefix(request: web.Request) -> web.Response:
    """``POST /v1/prefix/unpin``: takes pins of the caller's prompt back."""
    _, found = await _find(request)
    unpinned = await _opened(request).store.unpin(found.chain.blocks)
    return json_response({"unpinned_tokens": {name: blocks * BLOCK_SIZE for name, blocks in unpinned.items()}})


async def clear_prefixes(request: web.Request) -> web.Response:
    """``DELETE /v1/prefix``: empties the tiers of this process and its engine's memory of what can be found there."""
    return json_response({"removed": await forget_all(request.app[STATE], _opened(request).store)})


def _opened(request: web.Request) -> OpenStore:
    opened = request.app[STATE].opened_store
    if opened is None:
        raise NotFound("this engine keeps no prefixes beyond its own memory; see keepgate backend --help")
    return opened


async def _find(request: web.Request) -> tuple[int, PrefixLocation]:
    """How many tokens the prompt in a request's body has, and where they are."""
    state = request.app[STATE]
    _opened(request)
    asked, _ = decode_request(await read_body(request), TokenizeRequest, state.model.name)
    tokens = await asyncio.to_thread(state.reader.tokens.ids, asked)
    found = await state.prefixes.where(tokens, tenant_keys(request))
    return len(tokens), found


def describe_engine_store(state: ServerState, opened: OpenStore) -> dict[str, Any]:
    """What the tiers and the engine's memory hold, what they have saved, and what was decided."""
    stats = state.metrics.stats
    described = describe_store(opened, BLOCK_SIZE, state.prefixes.rate.block_seconds)
    restored = sum(tier["tokens_saved"] for tier in described["tiers"].values())
    device = {
        "blocks": stats.cached_blocks + stats.held_blocks,
        "capacity_blocks": state.engine.engine.pool.num_blocks,
        "tokens_saved": max(0, stats.prefix_cache_hits - restored),
    }
    return {
        **described,
        "tokens_asked": stats.prefix_cache_queries,
        "tokens_saved": stats.prefix_cache_hits,
        "tiers": {"device": device, **described["tiers"]},
        "audits": dataclasses.asdict(state.prefixes.audits),
    }
