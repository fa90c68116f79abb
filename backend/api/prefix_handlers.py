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
from prefix_store.store.fetch_plan import PEERS
from prefix_store.store.open_store import OpenStore
from prefix_store.tiers.counts import TierCounts


async def prefix_blocks(request: web.Request) -> web.StreamResponse:
    """``POST /v1/prefix/blocks``: KV blocks by their hashes, for other engines that know the secret."""
    server = _opened(request).server
    if server is None:
        raise NotFound("this engine gives no KV blocks to others: it has no index, or no secret")
    return await server.answer(request)


async def describe_prefixes(request: web.Request) -> web.Response:
    """``GET /v1/prefix``: what there is, what it has saved, and what was decided."""
    return json_response(describe_store(request.app[STATE], _opened(request)))


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


def describe_store(state: ServerState, opened: OpenStore) -> dict[str, Any]:
    """What the tiers hold, what they have saved, and what was decided."""
    store, stats = opened.store, state.metrics.stats
    figures, config = store.figures, opened.config
    restored = {name: figures.restored[name] * BLOCK_SIZE for name in (*store.tiers, PEERS)}
    capacities = {"memory": config.memory_bytes, "disk": config.disk_bytes}
    tiers: dict[str, Any] = {
        "device": {
            "blocks": stats.cached_blocks + stats.held_blocks,
            "capacity_blocks": state.engine.engine.pool.num_blocks,
            "tokens_saved": max(0, stats.prefix_cache_hits - sum(restored.values())),
        }
    }
    for name, tier in store.tiers.items():
        tiers[name] = {
            "codec": tier.format.codec.name,
            "blocks": tier.blocks,
            "bytes": tier.used_bytes,
            "capacity_bytes": capacities.get(name),
            "tokens_saved": restored[name],
            **_counts(tier.counts),
        }
    if store.peers is not None:
        tiers[PEERS] = {"tokens_saved": restored[PEERS], **_counts(store.peers.counts)}
    index = opened.index
    return {
        "namespace": opened.namespace.hex(),
        "block_size": BLOCK_SIZE,
        "block_bytes": opened.block_bytes,
        "tokens_asked": stats.prefix_cache_queries,
        "tokens_saved": stats.prefix_cache_hits,
        "tiers": tiers,
        "decisions": {
            "fetched_blocks": dict(figures.fetched),
            "computed_blocks": dict(figures.computed),
            "late_fetches": figures.late,
            "block_seconds": {
                "computed": state.prefixes.rate.block_seconds,
                **{name: time.estimate(1) for name, time in store.times.items()},
            },
        },
        "audits": dataclasses.asdict(state.prefixes.audits),
        "index": None
        if index is None
        else {
            "well": index.connection.is_available,
            "owners": [
                {"name": owner.name, "blocks": owner.details.blocks, "bytes": owner.details.size}
                for owner in index.owners.values()
            ],
            "failed_matches": index.failed_matches,
            "unsaid_blocks": index.dropped,
        },
        "blocks_given": None if opened.server is None else opened.server.frames,
    }


def _counts(counts: TierCounts) -> dict[str, Any]:
    return {
        "hits": counts.hits,
        "misses": counts.misses,
        "writes": counts.writes,
        "evictions": counts.evictions,
        "bytes_read": counts.bytes_read,
        "gigabytes_per_second": counts.bytes_read / counts.read_seconds / 1e9 if counts.read_seconds else None,
        "bad_frames": dict(counts.bad_frames),
        "rejected": dict(counts.rejected),
        "io_errors": dict(counts.io_errors),
    }
