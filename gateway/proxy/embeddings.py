"""Embeddings: each input of a batch is an entry of its own, and only inputs that are not stored go to an upstream."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from cache.entries.answer import usage_of
from cache.entries.entry import Entry, Tag
from cache.entries.key import Key, request_key
from cache.entries.outcomes import Hit
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from gateway import metrics
from gateway.costs.pricing import Charge
from gateway.errors import GatewayError, InternalError, InvalidRequest, NotCached, UpstreamDisconnected, UpstreamError
from gateway.http.background_tasks import BackgroundTasks
from gateway.http.cache_control import CacheControl, parse_cache_control, tags_of
from gateway.http.json_object import decode_object
from gateway.proxy.deadlines import deadline_in, outlasts, timeout_of, wait_until
from gateway.proxy.lookup import count_lookup
from gateway.proxy.metering.accounting import Accounting
from gateway.proxy.metering.admissions import Admissions
from gateway.proxy.model_names import resolved
from gateway.routing.call import RouteCall
from gateway.routing.models import ModelTable
from gateway.routing.router import Router
from gateway.settings.cache import CacheSettings
from gateway.tenants.caller import Caller
from gateway.tenants.credentials import answer_headers
from gateway.tenants.policies import reads_cache, writes_cache
from gateway.upstreams.identity import with_own_model
from gateway.upstreams.upstream import Attempt
from telemetry.tracing.span import Span

PATH = "/v1/embeddings"

_encode = msgspec.json.Encoder().encode
_MAX_RESPONSE_BYTES = 2**28
_STORED_AT_ONCE = 64
_LARGE_BODY = 2**18


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """A parsed request. `inputs` are its texts or lists of token ids, and `keys` where their embeddings are kept."""

    caller: Caller
    path: str
    body: bytes
    headers: CIMultiDictProxy[str]
    fields: dict[str, Any]
    model: str
    inputs: list[Any]
    keys: list[Key]
    cache_control: CacheControl
    timeout: float | None
    """Seconds that the client gives for the whole answer, if it says so."""
    tags: tuple[str, ...] = ()
    """What the client calls the answer."""


@dataclass(eq=False, slots=True)
class _Batch:
    """One call to an upstream. After `done` it has the entries of its inputs by id, or an error, or a refusal."""

    asked: EmbeddingsRequest
    deadline: float | None
    generation: str
    """The purge state when it began; `tags` those of its names, `purges` how many purges there had been in all."""
    tags: tuple[Tag, ...]
    purges: int
    request: bytes = b""
    """The body that was sent: a client's own if nothing of it was stored."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    entries: dict[str, Entry] = field(default_factory=dict)
    charge: Charge | None = None
    tokens: int = 0
    error: GatewayError | None = None
    status: int = 0
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    body: bytes = b""


class _List(msgspec.Struct):
    """The response, of which only the order of its items is read."""

    data: list[dict[str, msgspec.Raw]]
    model: str = ""
    usage: dict[str, Any] | None = None


class _Stored(msgspec.Struct):
    """The body of an entry: one item without its index, and the model as the response names it."""

    model: str
    item: msgspec.Raw


def parse_embeddings(
    path: str, body: bytes, headers: CIMultiDictProxy[str], caller: Caller, settings: CacheSettings, models: ModelTable
) -> EmbeddingsRequest | None:
    """Parse a request body; None if it has no model or no inputs in OpenAI's form, which is for the upstream to judge.

    Raises InvalidRequest for a body that is not one JSON object, and ModelNotAllowed.
    """
    fields = decode_object(body)
    model, given = fields.get("model"), fields.get("input")
    inputs = [given] if isinstance(given, str) or _are_tokens(given) else given
    if not isinstance(model, str) or not isinstance(inputs, list) or not inputs:
        return None
    if not all(isinstance(item, str) or _are_tokens(item) for item in inputs):
        return None
    chosen = resolved(models, model, fields, headers, caller).model
    if chosen != model:
        body, model, fields = with_own_model(body, {model: chosen}), chosen, {**fields, "model": chosen}
    family = "embeddings" + answer_headers(headers, settings.key_headers)
    common = {name: value for name, value in fields.items() if name != "input"}
    try:
        keys = [request_key(caller.namespace, family, {**common, "input": item}) for item in inputs]
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error
    cache_control = parse_cache_control(", ".join(headers.getall("Cache-Control", ())))
    return EmbeddingsRequest(
        caller,
        path,
        body,
        caller.forwarded(headers),
        fields,
        model,
        inputs,
        keys,
        cache_control,
        timeout_of(headers),
        tags_of(headers),
    )


def _are_tokens(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(token) is int for token in item)


class Embeddings:
    """Answers embedding requests from the exact cache and from upstreams. Owns the calls: no client's end ends one."""

    def __init__(
        self,
        cache: ExactCache,
        router: Router,
        tasks: BackgroundTasks,
        settings: CacheSettings,
        admissions: Admissions,
        accounting: Accounting,
    ) -> None:
        self._admissions = admissions
        self._accounting = accounting
        self._cache = cache
        self._router = router
        self._tasks = tasks
        self._settings = settings
        self._computing: dict[str, _Batch] = {}

    async def answer(self, asked: EmbeddingsRequest, span: Span) -> web.Response:
        """The response to a request with this span. Raises GatewayError."""
        control, deadline = asked.cache_control, deadline_in(asked.timeout)
        is_bypass = control.no_store or control.no_cache or not self._settings.enabled or not reads_cache(asked.caller)
        with span.span("cache.lookup"):
            entries = {} if is_bypass else await self._stored(asked)
        hits = sum(key.id in entries for key in asked.keys)
        _count(asked, entries, is_bypass)
        if hits < len(asked.keys):
            if control.only_if_cached:
                raise NotCached("Not all of the embeddings are in the cache, and the request says only-if-cached.")
            async with self._admissions.other(asked.caller, asked.body, span) as admission:
                with span.span("upstream.body"):
                    batches = await self._computed(asked, entries, deadline, joins=not is_bypass)
                    if any(batch.asked is not asked and batch.status != 200 for batch in batches):
                        # The refusal may be about what only the other request had.
                        batches = await self._computed(asked, entries, deadline, joins=False)
                started = [batch for batch in batches if batch.asked is asked]
                dollars = sum(batch.charge.cost or 0.0 for batch in started if batch.charge is not None)
                admission.settle(sum(batch.tokens for batch in started), dollars)
            for batch in batches:
                if batch.error is not None:
                    raise batch.error
                if batch.status != 200 or batch.request is asked.body:
                    headers = batch.headers.copy()
                    headers.extend(_headers(hits, len(asked.keys), is_bypass))
                    return web.Response(status=batch.status, body=batch.body, headers=headers)
                entries |= batch.entries
        else:
            await self._admissions.hit(asked.caller)
            self._accounting.embedded_hit(asked.caller, [entries[key.id] for key in asked.keys])
        size = sum(len(entries[key.id].body) for key in asked.keys)
        body = await asyncio.to_thread(_joined, asked, entries) if size > _LARGE_BODY else _joined(asked, entries)
        own = {"Content-Type": "application/json", **_headers(hits, len(asked.keys), is_bypass)}
        return web.Response(body=body, headers=own)

    async def _stored(self, asked: EmbeddingsRequest) -> dict[str, Entry]:
        """The entries that may be served, by id."""
        different = {key.id: key for key in asked.keys}.values()
        outcomes = await asyncio.gather(*(self._cache.lookup(key) for key in different))
        for outcome in outcomes:
            count_lookup(outcome)
        served = (o.entry for o in outcomes if isinstance(o, Hit) and asked.cache_control.accepts(o))
        return {entry.id: entry for entry in served}

    async def _computed(
        self, asked: EmbeddingsRequest, entries: dict[str, Entry], deadline: float | None, *, joins: bool
    ) -> list[_Batch]:
        """The finished calls that compute the missing inputs, each of which is computed once. Raises DeadlineExceeded
        when others are not.
        """
        batches: dict[_Batch, None] = {}
        mine: dict[str, tuple[Key, Any]] = {}
        for key, item in zip(asked.keys, asked.inputs, strict=True):
            if key.id in entries or key.id in mine:
                continue
            running = self._computing.get(key.id)
            if joins and running is not None and self._may_join(asked, running, deadline):
                batches[running] = None
            else:
                mine[key.id] = (key, item)
        if mine:
            batch = _Batch(
                asked,
                deadline,
                self._cache.generation(asked.keys[0].namespace, asked.model),
                self._cache.tagged(asked.tags),
                self._cache.purges,
            )
            batches[batch] = None
            if joins:
                self._computing |= dict.fromkeys(mine, batch)
            self._tasks.start_isolated(self._compute(asked, list(mine.values()), batch))
        for batch in batches:
            await wait_until(None if batch.asked is asked else deadline, batch.done.wait())
        return list(batches)

    def _may_join(self, asked: EmbeddingsRequest, running: _Batch, deadline: float | None) -> bool:
        """Whether a call ends in time, and began after the last purge of its answers, by whatever name."""
        if not outlasts(running.deadline, deadline):
            return False
        if running.purges == self._cache.purges:
            return True
        is_current = running.generation == self._cache.generation(asked.keys[0].namespace, asked.model)
        return is_current and self._cache.are_current(running.tags) and set(asked.tags) <= set(running.asked.tags)

    async def _compute(self, asked: EmbeddingsRequest, wanted: Sequence[tuple[Key, Any]], batch: _Batch) -> None:
        batch.error = InternalError("The gateway failed while it fetched embeddings. Its log says where.")
        try:
            batch.error = await self._fetch(asked, wanted, batch)
        finally:
            for key, _ in wanted:
                if self._computing.get(key.id) is batch:
                    del self._computing[key.id]
            batch.done.set()
        if not batch.entries or asked.cache_control.no_store or not self._settings.enabled:
            return
        if not writes_cache(asked.caller):
            return
        if parse_cache_control(", ".join(batch.headers.getall("Cache-Control", ()))).no_store:
            metrics.not_stored.labels("upstream says no-store").inc()
            return
        await self._store(batch.entries.values())

    async def _fetch(
        self, asked: EmbeddingsRequest, wanted: Sequence[tuple[Key, Any]], batch: _Batch
    ) -> GatewayError | None:
        """Make the call, and fill the batch."""
        inputs = [item for _, item in wanted]
        batch.request = asked.body if inputs == asked.inputs else _encode({**asked.fields, "input": inputs})
        began = time.monotonic()
        try:
            call = RouteCall(
                method="POST",
                headers=asked.headers,
                attempts=[Attempt(asked.path, batch.request, "embeddings")],
                model=asked.model,
                own=asked.caller.own,
                namespace=wanted[0][0].namespace,
                deadline=batch.deadline,
            )
            with await self._router.request(call) as answer:
                batch.status, batch.headers = answer.status, answer.headers
                batch.body = await answer.body(_MAX_RESPONSE_BYTES)
                if batch.status != 200:
                    return None
                seconds = time.monotonic() - began
                upstream = answer.upstream
            items = await asyncio.to_thread(_items, batch.body, inputs)
            batch.tokens = sum(tokens for _, tokens in items)
            batch.charge = self._accounting.embedded(asked.caller, upstream, answer.share, asked.model, batch.tokens)
        except UpstreamError as error:
            return error
        except ValueError as error:
            return UpstreamDisconnected(
                f"{upstream.title} answered with something else than {len(inputs)} embeddings: {error}."
            )
        for (key, _), (stored, tokens) in zip(wanted, items, strict=True):
            batch.entries[key.id] = Entry(
                id=key.id,
                proof=key.proof,
                family="embeddings",
                model=asked.model,
                body=stored,
                created=time.time(),
                fresh_for=self._settings.ttl,
                generation=batch.generation,
                has_usage=True,
                prompt_tokens=tokens,
                completion_tokens=0,
                seconds=seconds / len(inputs),
                repeat_cost=_part(batch.charge, tokens),
                upstream=upstream.name,
                tags=batch.tags,
            )
        return None

    async def _store(self, entries: Iterable[Entry]) -> None:
        for number, entry in enumerate(entries):
            try:
                await self._cache.store(entry)
                metrics.stored.inc()
            except StoreUnavailable:
                metrics.store_failures.labels("redis").inc()
            if number % _STORED_AT_ONCE == _STORED_AT_ONCE - 1:
                await asyncio.sleep(0)


def _part(charge: Charge | None, tokens: int) -> float | None:
    """What an input of so many tokens would cost again, of a call that is charged as a whole."""
    if charge is None or charge.repeat_cost is None:
        return None
    return charge.repeat_cost * tokens / charge.prompt_tokens if charge.prompt_tokens else 0.0


def _items(body: bytes, inputs: Sequence[Any]) -> list[tuple[bytes, int]]:
    """For each input the body of its entry, and its share of the tokens. Raises ValueError."""
    try:
        response = msgspec.json.decode(body, type=_List)
        by_index = {msgspec.json.decode(item["index"], type=int): item for item in response.data}
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, RecursionError) as error:
        raise ValueError(f"it is no list of embeddings ({type(error).__name__})") from error
    if sorted(by_index) != list(range(len(inputs))) or len(response.data) != len(inputs):
        raise ValueError(f"{len(response.data)} items")
    if not all("embedding" in item for item in response.data):
        raise ValueError("an item has no embedding")
    bodies = [
        _encode(_Stored(response.model, msgspec.Raw(_encode({n: v for n, v in by_index[i].items() if n != "index"}))))
        for i in range(len(inputs))
    ]
    usage = usage_of({"usage": response.usage})
    shares = _shares(usage.prompt_tokens if usage else 0, [len(item) for item in inputs])
    return list(zip(bodies, shares, strict=True))


def _shares(tokens: int, lengths: Sequence[int]) -> list[int]:
    """The tokens of a batch divided in proportion to the lengths of its inputs; the sum is exact."""
    whole, before, given = sum(lengths) or 1, 0, 0
    shares = []
    for length in lengths:
        before += length
        shares.append(tokens * before // whole - given)
        given += shares[-1]
    return shares


def _joined(asked: EmbeddingsRequest, entries: dict[str, Entry]) -> bytes:
    """The response in the order of the request."""
    stored = {id: msgspec.json.decode(entry.body, type=_Stored) for id, entry in entries.items()}
    items = [b'{"index":%d,%s' % (n, bytes(stored[key.id].item)[1:]) for n, key in enumerate(asked.keys)]
    tokens = sum(entries[key.id].prompt_tokens for key in asked.keys)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    rest = _encode({"model": stored[asked.keys[0].id].model, "usage": usage})
    return b'{"object":"list","data":[%s],%s' % (b",".join(items), rest[1:])


def _headers(hits: int, inputs: int, is_bypass: bool) -> dict[str, str]:
    if hits == inputs:
        status, kind = "keepgate; hit; detail=exact", "hit"
    elif hits:
        status, kind = f'keepgate; fwd=partial; detail="{hits} of {inputs} inputs"', "miss"
    else:
        status, kind = f"keepgate; fwd={'request' if is_bypass else 'uri-miss'}", "bypass" if is_bypass else "miss"
    layer = "exact" if hits == inputs else "none"
    return {"Cache-Status": status, "x-keepgate-cache": kind, "x-keepgate-layer": layer}


def _count(asked: EmbeddingsRequest, entries: dict[str, Entry], is_bypass: bool) -> None:
    hits = [entries[key.id] for key in asked.keys if key.id in entries]
    kind = "bypass" if is_bypass else "hit" if len(hits) == len(asked.keys) else "miss"
    metrics.requests.labels("embeddings", kind, "exact" if kind == "hit" else "none").inc()
    metrics.embedding_inputs.labels("hit").inc(len(hits))
    metrics.embedding_inputs.labels("miss").inc(len(asked.keys) - len(hits))
    metrics.tokens_saved.labels("exact", "prompt").inc(sum(entry.prompt_tokens for entry in hits))
    metrics.seconds_saved.labels("exact").inc(sum(entry.seconds for entry in hits))
