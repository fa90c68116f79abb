"""What the upstreams that are Keepgate's engine do now, for the operator: each is asked, and the others are named."""

import asyncio
from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from gateway.api.access import require_operator
from gateway.api.app_keys import ROUTER
from gateway.errors import GatewayError, InvalidRequest
from gateway.upstreams.upstream import Upstream

_PATH = "/engine"
"""Of the engine, beside its /v1: nothing of it is relayed to clients."""
_DEADLINE = 2.0
_MAX_BYTES = 2**20
_LACKING = frozenset({404, 405, 501})
_PASSING = frozenset({408, 425, 429})

_encode = msgspec.json.Encoder().encode


class EngineBatch(msgspec.Struct, kw_only=True):
    """Sequences in the batch, those that wait for a place, and the most that it takes. Of the last steps, `fill` is the
    share of its places that were used, and `padding` the share of computed rows that were no tokens.
    """

    running: int
    waiting: int
    max_batch: int
    fill: float
    padding: float


class EngineBlocks(msgspec.Struct, kw_only=True):
    """KV blocks: in all, held by running sequences, and free ones whose content can still be found."""

    total: int
    held: int
    cached: int
    tokens_per_block: int
    bytes_per_block: int


class EngineTokens(msgspec.Struct, kw_only=True):
    """Computed of prompts and generated, since the engine's start; and per second, over the last ten seconds."""

    prompt: int
    generated: int
    prefill_per_second: float
    decode_per_second: float


class EnginePrefixCache(msgspec.Struct, kw_only=True):
    """Tokens of prompts since the engine's start, and those of them that were in its memory or were restored."""

    tokens_asked: int
    tokens_found: int


class EngineDrafts(msgspec.Struct, kw_only=True):
    """Of one method since the engine's start: drafts, their tokens, and those of them that became part of an answer.
    `speedup` is the time that the tokens would have taken without drafts, as a multiple of the time that they took.
    """

    drafts: int
    proposed_tokens: int
    accepted_tokens: int
    speedup: float


class PrefixTier(msgspec.Struct, kw_only=True):
    """`tokens_saved` were found here and not computed. Counts are of blocks; what a tier does not count is left out."""

    tokens_saved: int
    codec: str | UnsetType = UNSET
    blocks: int | UnsetType | None = UNSET
    capacity_blocks: int | UnsetType | None = UNSET
    bytes: int | UnsetType | None = UNSET
    capacity_bytes: int | UnsetType | None = UNSET
    hits: int | UnsetType = UNSET
    misses: int | UnsetType = UNSET
    writes: int | UnsetType = UNSET
    evictions: int | UnsetType = UNSET
    bytes_read: int | UnsetType = UNSET
    gigabytes_per_second: float | UnsetType | None = UNSET


class EngineIndex(msgspec.Struct, kw_only=True):
    """The index in Redis, which knows the blocks of the other engines: whether it answers."""

    well: bool


class EnginePrefixStore(msgspec.Struct, kw_only=True):
    """Its tiers in the order in which they are asked: device, memory, disk or others, peers. Without an `index` it is
    null.
    """

    tiers: dict[str, PrefixTier]
    index: EngineIndex | None


class Engine(msgspec.Struct, kw_only=True):
    """`prefix_store` is null for an engine that keeps no blocks beyond its own memory, and `drafts` are by method."""

    object: Literal["keepgate.engine"]
    model: str
    runner: str
    alive: bool
    batch: EngineBatch
    kv_blocks: EngineBlocks
    tokens: EngineTokens
    prefix_cache: EnginePrefixCache
    preemptions: int
    drafts: dict[str, EngineDrafts]
    prefix_store: EnginePrefixStore | None


class EngineOfUpstream(msgspec.Struct, kw_only=True):
    """An upstream. `state` is `engine`, `other` for a server that is not Keepgate's engine, or `away`; `reason` is a
    sentence where it is not `engine`.
    """

    upstream: str
    state: Literal["engine", "other", "away"]
    reason: str | UnsetType = UNSET
    engine: Engine | UnsetType = UNSET


class EngineList(msgspec.Struct, kw_only=True):
    """In the order of the upstreams."""

    object: Literal["list"] = "list"
    data: list[EngineOfUpstream]


_decode = msgspec.json.Decoder(Engine).decode


async def list_engines(request: web.Request) -> web.Response:
    """GET /v1/engines: batch, queue, KV blocks, rates and prefix tiers of each upstream that is Keepgate's engine."""
    require_operator(request)
    for field in request.query:
        raise InvalidRequest(f"'{field}' is no parameter of this list, which has none.", param=field)
    found = await asyncio.gather(*(_ask(upstream) for upstream in request.app[ROUTER].upstreams))
    return web.Response(body=_encode(EngineList(data=found)), content_type="application/json")


async def _ask(upstream: Upstream) -> EngineOfUpstream:
    # Until an upstream was away it stays what it is, so a provider's API is not asked again and again.
    if _PATH in upstream.lacks:
        return _other(upstream)
    try:
        async with asyncio.timeout(_DEADLINE):
            with await upstream.request("GET", _PATH, {}, None) as reply:
                status, body = reply.status, await reply.body(_MAX_BYTES)
    except GatewayError as error:
        return EngineOfUpstream(upstream=upstream.name, state="away", reason=str(error))
    except TimeoutError:
        return _away(upstream, f"did not answer GET {_PATH} in {_DEADLINE:g} s")
    if status in _PASSING or (status >= 500 and status not in _LACKING):
        return _away(upstream, f"answered GET {_PATH} with status {status}")
    if status != 200 or not _is_of_engine(body):
        upstream.lacks.add(_PATH)
        return _other(upstream)
    try:
        return EngineOfUpstream(upstream=upstream.name, state="engine", engine=_decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = f"{upstream.title} is an engine of another version; update it or the gateway. GET {_PATH}: {error}."
        return EngineOfUpstream(upstream=upstream.name, state="other", reason=reason)


def _is_of_engine(body: bytes) -> bool:
    """Whether a body says that it is an engine's, of any version."""
    try:
        said: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("object") == "keepgate.engine"


def _away(upstream: Upstream, what: str) -> EngineOfUpstream:
    return EngineOfUpstream(upstream=upstream.name, state="away", reason=f"{upstream.title} {what}.")


def _other(upstream: Upstream) -> EngineOfUpstream:
    reason = f"{upstream.title} is not Keepgate's engine: GET {_PATH} is not answered as the engine does."
    return EngineOfUpstream(upstream=upstream.name, state="other", reason=reason)
