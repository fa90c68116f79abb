"""Explaining a request without answering it: its key, what each layer would say and why, and what it misses by."""

import asyncio
import functools
import time
from typing import Literal

import msgspec
from aiohttp import web

from cache.entries.entry import Entry
from cache.entries.key import Key, namespace_for, namespace_of
from cache.entries.outcomes import Failed, Hit
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.index.entry_index import EntryFilter
from cache.index.fingerprint import Difference, Fingerprint, decode_fingerprint, differences
from cache.semantic.messages import ExplainedNeighbour, RiskFeature
from cache.semantic.messages import Explanation as SemanticExplanation
from gateway.api.access import require_operator
from gateway.api.app_keys import CACHE, LOOKUP, ROUTER, ROUTING, SEMANTIC, SETTINGS
from gateway.api.handlers import LARGE_BODY
from gateway.api.identification import caller_of
from gateway.api.operator.entries import EntrySummary, summaries
from gateway.api.operator.keys import REGISTRY
from gateway.errors import AdminForbidden, AdminKeyRequired, InvalidRequest, NotFound
from gateway.http.body import read_body
from gateway.proxy.inference_request import InferenceRequest, parse_request
from gateway.proxy.lookup import Lookup
from gateway.settings.cache import CacheSettings
from gateway.surfaces.registry import BY_PATH
from gateway.surfaces.whole import WholeEndpoint
from gateway.tenants.caller import Caller

Verdict = Literal["hit", "stale", "miss", "bypass", "failed", "off"]

_PARAMETERS = ("path", "namespace", "key")
_DEFAULT_PATH = "/v1/chat/completions"
_PATHS = tuple(path for path, form in BY_PATH.items() if not isinstance(form, WholeEndpoint))
_ASKED_LIKE = 20
_SHOWN = 5
# Of the tenant's newest entries those that differ in few fields are near too: a word in the question is a difference.
_NEWEST = 30
_FEW = 3
_encode = msgspec.json.Encoder().encode


class LayerVerdict(msgspec.Struct, kw_only=True):
    """What a layer would say now; `reason` is a sentence. `entry` has the answer that is, or could have been, served.

    `risk` is that of a similar answer, where it is known, and `features` are what makes it: the largest part first.
    """

    layer: Literal["exact", "semantic"]
    verdict: Verdict
    reason: str
    entry: str | None = None
    risk: float | None = None
    features: tuple[RiskFeature, ...] = ()


class NearEntry(msgspec.Struct, kw_only=True):
    """An entry that is nearly the answer. `differences` is null for an entry that does not know its request.

    Of what the semantic cache has found, `similarity` is the cosine of the questions, and `has_answer` says whether the
    entry has the answer that is meant; `veto` is then the name of what forbids that its question vouches for
    this answer. What a veto is against one question may be no more than a feature where several have the answer.
    """

    entry: EntrySummary
    differences: list[Difference] | None
    similarity: float | None = None
    has_answer: bool | None = None
    veto: str = ""


class RequestExplanation(msgspec.Struct, kw_only=True):
    """`key` is the id under which an answer would be stored; `nearest` are entries, the one most alike first.
    `elsewhere` are namespaces of other tenants that have the answer, of a miss that the operator asks about.
    """

    object: Literal["cache.explanation"] = "cache.explanation"
    key: str
    namespace: str
    model: str
    layers: list[LayerVerdict]
    nearest: list[NearEntry]
    elsewhere: list[str] = []


async def explain(request: web.Request) -> web.Response:
    """POST /v1/cache/explain: the body is that of the request in question, its headers are this request's."""
    query = request.query
    for field in query:
        if field not in _PARAMETERS:
            raise InvalidRequest(
                f"'{field}' is no parameter of an explanation; use {', '.join(_PARAMETERS)}.", param=field
            )
    caller = await _caller(request)
    settings = request.app[SETTINGS]
    body = await read_body(request, settings.max_body, settings.timeouts.client)
    path, _, query_of_path = query.get("path", _DEFAULT_PATH).partition("?")
    if path not in _PATHS:
        raise InvalidRequest(f"'path' must be one of {', '.join(_PATHS)}.", param="path")
    read = functools.partial(
        parse_request,
        path,
        query_of_path,
        body,
        request.headers,
        caller,
        settings,
        request.app[ROUTER],
        request.app[ROUTING].models,
    )
    inference = await asyncio.to_thread(read) if len(body) > LARGE_BODY else read()
    asked = decode_fingerprint(inference.fingerprint)
    assert asked is not None  # noqa: S101  # it was encoded just now
    cache = request.app[CACHE]
    exact = await _exact(request.app[LOOKUP], cache, settings.cache, inference)
    semantic, found = await _semantic(request, inference)
    if exact.verdict == "bypass":
        semantic = LayerVerdict(layer="semantic", verdict="bypass", reason=exact.reason)
    is_miss = exact.verdict == "miss" and exact.entry is None
    answer = RequestExplanation(
        key=inference.key.id,
        namespace=inference.key.namespace,
        model=inference.model,
        layers=[exact, semantic],
        nearest=await _nearest(cache, inference.key, asked, found, exact.entry, with_newest=is_miss),
        elsewhere=await _elsewhere(request, caller, inference.key) if is_miss else [],
    )
    return web.Response(body=_encode(answer), content_type="application/json")


async def _caller(request: web.Request) -> Caller:
    """Whose request it is: a tenant's own; for the operator, whose it names, or its own."""
    query, caller = request.query, caller_of(request)
    if "key" not in query and "namespace" not in query:
        if caller is None:
            require_operator(request)
            return Caller("public", "")
        return caller
    require_operator(request)
    if "key" in query and "namespace" in query:
        raise InvalidRequest("An explanation takes one of namespace and key.", param="key")
    if "namespace" in query:
        if "." in query["namespace"]:
            raise InvalidRequest("'namespace' is the part of an entry's id before the dot.", param="namespace")
        return Caller(query["namespace"], "")
    if (registry := request.app.get(REGISTRY)) is None:
        raise InvalidRequest("'key' needs virtual keys, which need a Redis.", param="key")
    try:
        key = await registry.get(query["key"])
    except NotFound as error:
        raise NotFound(
            f"{error} 'key' is the name or id of a virtual key; for an app's own API key, send that as the bearer token"
            " of this request.",
            param="key",
        ) from error
    return Caller(namespace_for(key.tenant), key.tenant, key)


async def _exact(
    lookup: Lookup, cache: ExactCache, settings: CacheSettings, inference: InferenceRequest
) -> LayerVerdict:
    def verdict(kind: Verdict, reason: str, entry: str | None = None) -> LayerVerdict:
        return LayerVerdict(layer="exact", verdict=kind, reason=reason, entry=entry)

    if reason := lookup.bypass_reason(inference):
        return verdict("bypass", _BYPASSES.get(reason, f"the request says {reason}"))
    variants = settings.variants if inference.sampled and settings.sampled == "variants" else 1
    for number in range(variants):
        outcome = await cache.lookup(inference.key.variant(number))
        if isinstance(outcome, Hit):
            continue
        if isinstance(outcome, Failed):
            return verdict("failed", outcome.reason)
        if number:
            return verdict("miss", f"it is sampled, and {number} of {variants} variants are stored")
        return verdict("miss", "no entry has its key")
    assert isinstance(outcome, Hit)  # noqa: S101  # there is one variant at least
    age, entry = f"{outcome.age:.0f} s old", outcome.entry.id
    if lookup.may_serve(inference, outcome):
        if outcome.stale:
            return verdict("stale", f"the answer, {age}, is served while it is computed again", entry)
        return verdict("hit", f"the answer is in {outcome.tier}, {age}", entry)
    if inference.needs_usage and not outcome.entry.has_usage:
        return verdict("miss", "the answer has no usage, which the request asks for", entry)
    if outcome.stale:
        return verdict("miss", f"the answer is {age}, and its lifetime is {outcome.entry.fresh_for:.0f} s", entry)
    return verdict("miss", f"the answer is {age}, and the request's Cache-Control wants another age", entry)


_BYPASSES = {
    "disabled": "the cache is off (cache.enabled)",
    "key": "the virtual key does not read the cache",
    "sampled": "the request is sampled, and cache.sampled is bypass",
}


async def _semantic(
    request: web.Request, inference: InferenceRequest
) -> tuple[LayerVerdict, dict[str, ExplainedNeighbour]]:
    """The verdict, and what is known of entries by their ids."""
    if request.app[SETTINGS].semantic.mode == "off":
        return LayerVerdict(layer="semantic", verdict="off", reason="the semantic cache is off (semantic.mode)"), {}
    try:
        found = await request.app[SEMANTIC].explain(inference)
    except StoreUnavailable as error:
        return LayerVerdict(layer="semantic", verdict="failed", reason=str(error)), {}
    return _semantic_verdict(found), {each.entry: each for each in found.neighbours}


def _semantic_verdict(found: SemanticExplanation) -> LayerVerdict:
    return LayerVerdict(
        layer="semantic",
        verdict="hit" if found.layer else "miss",
        reason=found.reason,
        entry=found.entry or None,
        risk=found.risk,
        features=found.features,
    )


async def _nearest(
    cache: ExactCache,
    key: Key,
    asked: Fingerprint,
    found: dict[str, ExplainedNeighbour],
    answer: str | None,
    *,
    with_newest: bool,
) -> list[NearEntry]:
    """Entries of the same question, those that the semantic cache has found, and `with_newest` of the newest ones those
    that differ in little. None while the store is away.
    """
    try:
        await cache.index.flush()
        like = await cache.index.asked_like(key.namespace, asked.question, _ASKED_LIKE) if asked.question else ()
        # Answers that other tenants have published are not this tenant's to look at.
        ids = [each for each in dict.fromkeys([*like, *found]) if namespace_of(each) == key.namespace]
        alike = set(ids)
        if with_newest and len(ids) < _SHOWN:
            newest = await cache.index.page(EntryFilter(namespace=key.namespace), None, _NEWEST)
            ids = [*dict.fromkeys([*ids, *newest.ids])]
        entries = await cache.entries([each for each in ids if each != answer])
        listed = await summaries(cache, entries, time.time())
    except StoreUnavailable:
        return []
    near = [
        _near_entry(summary, _differences(asked, entry), found.get(entry.id))
        for summary, entry in zip(listed, entries, strict=True)
    ]
    near = [each for each in near if each.entry.id in alike or _differs_in_few(each)]
    near.sort(
        key=lambda each: (
            each.differences is None,
            len(each.differences or ()),
            -(each.similarity or 0.0),
            -each.entry.created,
        )
    )
    return near[:_SHOWN]


def _near_entry(
    entry: EntrySummary, differences: list[Difference] | None, found: ExplainedNeighbour | None
) -> NearEntry:
    if found is None:
        return NearEntry(entry=entry, differences=differences)
    return NearEntry(
        entry=entry,
        differences=differences,
        similarity=found.similarity,
        has_answer=found.has_answer,
        veto=found.veto,
    )


def _differs_in_few(near: NearEntry) -> bool:
    return near.differences is not None and len(near.differences) <= _FEW


async def _elsewhere(request: web.Request, caller: Caller, key: Key) -> list[str]:
    """Namespaces of other tenants that have the answer, for the operator who has named no tenant, or a wrong one."""
    try:
        require_operator(request)
    except (AdminForbidden, AdminKeyRequired):
        return []
    if caller.credential and caller.key is None and not caller.is_operator:
        return []  # a tenant of a gateway that asks for no admin key
    try:
        return list(await request.app[CACHE].index.elsewhere(key.id, _SHOWN))
    except StoreUnavailable:
        return []


def _differences(asked: Fingerprint, entry: Entry) -> list[Difference] | None:
    known = decode_fingerprint(entry.asked)
    return None if known is None else differences(asked, known)
