"""The cache's figures as an operator reads them, from the counters of all workers on this host."""

from typing import Any

from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from gateway import metrics


async def collect(cache: ExactCache) -> dict[str, Any]:
    """The body of GET /v1/cache/stats. Counts are since the start; rates are shares between 0 and 1."""
    totals = _Totals()
    exact = {kind: totals.sum("requests", cache=kind) for kind in ("hit", "miss", "bypass", "failed")}
    saved = {
        "prompt_tokens": int(totals.sum("tokens_saved", kind="prompt")),
        "completion_tokens": int(totals.sum("tokens_saved", kind="completion")),
        "seconds": round(totals.sum("seconds_saved"), 6),
    }
    memory = {
        **_tier(totals, "memory"),
        "entries": int(totals.sum("memory_entries", total=False)),
        "bytes": int(totals.sum("memory_bytes", total=False)),
        "evictions": int(totals.sum("memory_evictions", total=False)),
    }
    layer = {
        "hits": int(exact["hit"]),
        "misses": int(exact["miss"]),
        "bypasses": int(exact["bypass"]),
        "failures": int(exact["failed"]),
        "hit_rate": _rate(exact["hit"], exact["miss"] + exact["failed"]),
        "entries": memory["entries"],
        "bytes": memory["bytes"],
        "saved": saved,
        "tiers": {"memory": memory},
    }
    if cache.redis is not None:
        layer["tiers"]["redis"] = redis = {**_tier(totals, "redis"), **await _redis_usage(cache)}
        if redis["entries"] is not None:
            layer["entries"], layer["bytes"] = redis["entries"], redis["bytes"]
    return {
        "requests": int(sum(exact.values())),
        "collapsed": int(totals.sum("collapsed_requests")),
        "hit_rate": layer["hit_rate"],
        "saved": saved,
        "layers": {"exact": layer},
    }


class _Totals:
    """All samples of the moment, summed over the labels that are not asked for."""

    def __init__(self) -> None:
        self._samples = list(metrics.samples())

    def sum(self, name: str, total: bool = True, **labels: str) -> float:
        wanted = f"keepgate_{name}" + ("_total" if total else "")
        return sum(
            value
            for sample, sample_labels, value in self._samples
            if sample == wanted and labels.items() <= sample_labels.items()
        )


def _tier(totals: _Totals, tier: str) -> dict[str, Any]:
    hits, misses, failures = (
        totals.sum("tier_lookups", tier=tier, outcome=outcome) for outcome in ("hit", "miss", "failed")
    )
    return {
        "hits": int(hits),
        "misses": int(misses),
        "failures": int(failures),
        "hit_rate": _rate(hits, misses + failures),
    }


async def _redis_usage(cache: ExactCache) -> dict[str, Any]:
    """Keys and memory of the whole database: exact when nothing else lives in it."""
    assert cache.redis is not None  # noqa: S101  # the caller has looked
    try:
        keys, used = await cache.redis.usage()
    except StoreUnavailable:
        return {"available": False, "entries": None, "bytes": None}
    return {"available": True, "entries": keys, "bytes": used}


def _rate(hits: float, others: float) -> float:
    return round(hits / (hits + others), 6) if hits + others else 0.0
