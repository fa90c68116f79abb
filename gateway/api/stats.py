"""The cache's figures as an operator reads them, from the counters of all workers on this host."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.stores.conversations import Conversations
from gateway import metrics
from gateway.costs.pricing import Pricing
from gateway.proxy.flight import FlightTable
from gateway.proxy.semantic_lookup import SemanticLookup
from gateway.telemetry.request_log import RequestLog
from gateway.upstreams.upstream import Upstream


async def collect(cache: ExactCache, semantic: SemanticLookup) -> dict[str, Any]:
    """The body of GET /v1/cache/stats. Counts are since the start; rates are shares between 0 and 1."""
    totals = _Totals()
    kinds = {kind: totals.sum("requests", {"cache": kind}) for kind in ("hit", "miss", "bypass", "failed")}
    hits = {layer: int(totals.sum("requests", {"cache": "hit", "layer": layer})) for layer in metrics.LAYERS}
    memory = {
        **_tier(totals, "memory"),
        "entries": int(totals.sum("memory_entries", total=False)),
        "bytes": int(totals.sum("memory_bytes", total=False)),
        "evictions": int(totals.sum("memory_evictions")),
    }
    asked = sum(kinds.values()) - kinds["bypass"]
    exact = {
        "hits": hits["exact"],
        "misses": int(asked - hits["exact"] - kinds["failed"]),
        "bypasses": int(kinds["bypass"]),
        "failures": int(kinds["failed"]),
        "hit_rate": _rate(hits["exact"], asked - hits["exact"]),
        "entries": memory["entries"],
        "bytes": memory["bytes"],
        "saved": _saved(totals, layer="exact"),
        "tiers": {"memory": memory},
    }
    if cache.redis is not None:
        exact["tiers"]["redis"] = redis = {
            **_tier(totals, "redis"),
            **await _redis_usage(cache),
            "writes_dropped": int(totals.sum("redis_writes_dropped")),
            **_unreadable(totals, "entry"),
        }
        if redis["entries"] is not None:
            exact["entries"], exact["bytes"] = redis["entries"], redis["bytes"]
    layers = {
        "exact": exact,
        **{layer: {"hits": hits[layer], "saved": _saved(totals, layer=layer)} for layer in ("normalized", "semantic")},
    }
    layers["semantic"] |= await semantic.describe()
    return {
        "requests": int(sum(kinds.values())),
        "collapsed": int(totals.sum("collapsed_requests")),
        "hit_rate": _rate(kinds["hit"], kinds["miss"] + kinds["failed"]),
        "saved": _saved(totals),
        "layers": layers,
        "prefix": _prefill(totals),
        "predictions": _predictions(totals),
        "conversations": _unreadable(totals, "conversation"),
    }


def _unreadable(totals: "_Totals", record: str) -> dict[str, int]:
    """How many records of a kind could not be read, by the reason."""
    reasons = ("undecryptable", "corrupt")
    return {reason: int(totals.sum("redis_unreadable", {"record": record, "reason": reason})) for reason in reasons}


def _prefill(totals: "_Totals") -> dict[str, Any]:
    """Of the prompts that were computed: how many tokens upstreams read from their prompt caches, and wrote there."""
    upstreams = sorted(totals.labels("upstream_prompt_tokens", "upstream"))
    return {
        **_prefix_tokens(totals, {}),
        "upstreams": {upstream: _prefix_tokens(totals, {"upstream": upstream}) for upstream in upstreams},
    }


def _predictions(totals: "_Totals") -> dict[str, Any]:
    """Answers that were computed with a stored one as prediction, and what became of its tokens, by source."""

    def counts(labels: Mapping[str, str]) -> dict[str, int]:
        accepted, rejected = (
            int(totals.sum("prediction_tokens", {**labels, "outcome": outcome})) for outcome in ("accepted", "rejected")
        )
        answers = int(totals.sum("predictions", labels))
        return {"answers": answers, "accepted_tokens": accepted, "rejected_tokens": rejected}

    sources = sorted(totals.labels("predictions", "source"))
    return {**counts({}), "sources": {source: counts({"source": source}) for source in sources}}


def _prefix_tokens(totals: "_Totals", labels: Mapping[str, str]) -> dict[str, Any]:
    prompt_tokens, prefix_tokens, written_tokens = (
        int(totals.sum(f"upstream_{name}", labels))
        for name in ("prompt_tokens", "cached_prompt_tokens", "cache_write_prompt_tokens")
    )
    return {
        "prompt_tokens": prompt_tokens,
        "prefix_tokens": prefix_tokens,
        "written_tokens": written_tokens,
        "hit_rate": _rate(prefix_tokens, prompt_tokens - prefix_tokens),
    }


def _saved(totals: "_Totals", layer: str = "") -> dict[str, Any]:
    """What hits saved, of one layer or of all."""
    labels = {"layer": layer} if layer else {}
    return {
        "prompt_tokens": int(totals.sum("tokens_saved", {"kind": "prompt", **labels})),
        "completion_tokens": int(totals.sum("tokens_saved", {"kind": "completion", **labels})),
        "seconds": round(totals.sum("seconds_saved", labels), 6),
    }


class _Totals:
    """All samples of the moment, summed over the labels that are not asked for."""

    def __init__(self) -> None:
        self._samples = list(metrics.samples())

    def sum(self, name: str, labels: Mapping[str, str] = MappingProxyType({}), total: bool = True) -> float:
        wanted = f"keepgate_{name}" + ("_total" if total else "")
        return sum(
            value
            for sample, sample_labels, value in self._samples
            if sample == wanted and labels.items() <= sample_labels.items()
        )

    def labels(self, name: str, label: str) -> set[str]:
        """The values that a label of a counter has had."""
        return {labels[label] for sample, labels, _ in self._samples if sample == f"keepgate_{name}_total"}


def _tier(totals: _Totals, tier: str) -> dict[str, Any]:
    hits, misses, failures = (
        totals.sum("tier_lookups", {"tier": tier, "outcome": outcome}) for outcome in ("hit", "miss", "failed")
    )
    return {
        "hits": int(hits),
        "misses": int(misses),
        "failures": int(failures),
        "hit_rate": _rate(hits, misses + failures),
    }


async def _redis_usage(cache: ExactCache) -> dict[str, Any]:
    """Entries by the index, of which some may be gone, and the memory of all databases."""
    assert cache.redis is not None  # noqa: S101  # the caller has looked
    try:
        await cache.index.flush()
        entries = sum((await cache.index.counts()).values())
        used = await cache.redis.used_bytes()
    except StoreUnavailable:
        return {"available": False, "entries": None, "bytes": None}
    return {"available": True, "entries": entries, "bytes": used}


def _rate(hits: float, others: float) -> float:
    return round(hits / (hits + others), 6) if hits + others else 0.0


class GaugeUpdater:
    """Copies the present state of the stores and the flights into the metrics."""

    def __init__(
        self,
        cache: ExactCache,
        conversations: Conversations,
        flights: FlightTable,
        requests: RequestLog,
        upstreams: Callable[[], Sequence[Upstream]],
    ) -> None:
        self._upstreams = upstreams
        self._shown_upstreams: set[str] = set()
        self._cache = cache
        self._conversations = conversations
        self._counted: dict[metrics.BufferedCounter, int] = {}
        self._flights = flights
        self._requests = requests
        self.pricing: Pricing | None = None
        """Whose machines have a figure."""

    def refresh(self) -> None:
        metrics.requests_in_flight.set(self._requests.in_flight)
        if self.pricing is not None:
            self.pricing.refresh()
        memory, redis = self._cache.memory, self._cache.redis
        metrics.memory_entries.set(len(memory))
        metrics.memory_bytes.set(memory.size)
        self._count(metrics.memory_evictions, memory.evictions)
        self._count_unreadable("conversation", self._conversations.undecryptable, self._conversations.corrupt_records)
        if redis is not None:
            self._count(metrics.redis_writes_dropped, redis.writes_dropped)
            self._count_unreadable("entry", redis.undecryptable, redis.corrupt_entries)
        metrics.redis_available.set(redis is not None and not redis.breaker.is_open)
        metrics.flights.set(len(self._flights))
        self._show_upstreams()
        metrics.flush()

    def _show_upstreams(self) -> None:
        up: Counter[str] = Counter()
        for upstream in self._upstreams():
            up[upstream.label] += upstream.state == "up"
        # With several workers a series cannot be removed. NaN is neither up nor down.
        for label in self._shown_upstreams - up.keys():
            metrics.upstream_available.labels(label).set(math.nan)
        for label, count in up.items():
            metrics.upstream_available.labels(label).set(count)
        self._shown_upstreams.update(up)

    def _count_unreadable(self, record: str, undecryptable: int, corrupt: int) -> None:
        self._count(metrics.redis_unreadable.labels(record, "undecryptable"), undecryptable)
        self._count(metrics.redis_unreadable.labels(record, "corrupt"), corrupt)

    def _count(self, counter: metrics.BufferedCounter, total: int) -> None:
        """Bring a counter forward by what a store's own has grown."""
        counter.inc(total - self._counted.get(counter, 0))
        self._counted[counter] = total
