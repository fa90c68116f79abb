"""Counters of the gateway: one source for /metrics and /v1/cache/stats.

With several workers on a host, prometheus_client's multiprocess mode sums them up: PROMETHEUS_MULTIPROC_DIR is set
before this module is imported.
"""

import os
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Self, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from cache.entries.entry import Entry, Family

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

FAMILIES: tuple[Family, ...] = get_args(Family)
LAYERS = ("exact", "normalized", "semantic")

registry = CollectorRegistry()
# A second series beside each counter, which is of no use.
disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client leaves it untyped


class _Buffered:
    """A metric in plain numbers, which `flush` adds to prometheus_client's: its labels and locks take microseconds, and
    a request counts twenty times. For the thread of the event loop alone.
    """

    __slots__ = ("_children", "_metric")

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._children: dict[tuple[str, ...], Self] = {}

    def labels(self, *values: str) -> Self:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = type(self)(self._metric.labels(*values))
        return child

    def flush(self) -> None:
        for child in self._children.values():
            child.flush()


class BufferedCounter(_Buffered):
    __slots__ = ("_value",)

    def __init__(self, metric: Counter) -> None:
        super().__init__(metric)
        self._value = 0.0

    def inc(self, amount: float = 1) -> None:
        self._value += amount

    def flush(self) -> None:
        super().flush()
        if self._value:
            self._metric.inc(self._value)
            self._value = 0.0


class _BulkHistogram(Histogram):
    def add(self, counts: Sequence[int], total: float) -> None:
        """Add many observations at once: how many for each bucket alone, and their sum."""
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            bucket.inc(count)


class BufferedHistogram(_Buffered):
    """Of seconds."""

    __slots__ = ("_counts", "_total")

    def __init__(self, metric: _BulkHistogram) -> None:
        super().__init__(metric)
        self._counts = [0] * (len(_SECONDS) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._total += seconds

    def flush(self) -> None:
        super().flush()
        if any(self._counts):
            self._metric.add(self._counts, self._total)
            self._counts, self._total = [0] * len(self._counts), 0.0


_buffered: list[_Buffered] = []


def _counter(name: str, text: str, *labels: str) -> BufferedCounter:
    counter = BufferedCounter(Counter(f"keepgate_{name}", text, labels, registry=registry))
    _buffered.append(counter)
    return counter


def _histogram(name: str, text: str, *labels: str) -> BufferedHistogram:
    histogram = BufferedHistogram(_BulkHistogram(f"keepgate_{name}", text, labels, buckets=_SECONDS, registry=registry))
    _buffered.append(histogram)
    return histogram


def flush() -> None:
    """Add what has been counted in plain numbers to the metrics, of which other workers may be asked."""
    for metric in _buffered:
        metric.flush()


requests = _counter("requests", "Requests for an answer, by how the cache took part.", "family", "cache", "layer")
tier_lookups = _counter("tier_lookups", "Lookups in a tier of the exact layer.", "tier", "outcome")
tokens_saved = _counter("tokens_saved", "Tokens of answers that came from the cache.", "layer", "kind")
seconds_saved = _counter("seconds_saved", "Upstream seconds of answers that came from the cache.", "layer")
embedding_inputs = _counter("embedding_inputs", "Inputs of embedding requests, by whether they were stored.", "cache")
collapsed = _counter("collapsed_requests", "Requests that shared the upstream call of another.")
stored = _counter("stored_answers", "Answers kept.")
not_stored = _counter("unstorable_answers", "Answers not kept.", "reason")
store_failures = _counter("store_failures", "Answers that a tier did not take.", "tier")
memory_evictions = _counter("memory_evictions", "Entries evicted from the memory tier.")
redis_writes_dropped = _counter("redis_writes_dropped", "Writes of answers that Redis did not take.")
redis_unreadable = _counter(
    "redis_unreadable",
    "Records of Redis that count as misses: damaged ones, and those that no key decrypts.",
    "record",
    "reason",
)
upstream_tokens = _counter("upstream_tokens", "Tokens that upstreams reported for computed answers.", "kind")
predictions = _counter("predictions", "Answers computed with a stored answer as prediction.", "source")
prediction_tokens = _counter(
    "prediction_tokens", "Tokens of such predictions, by whether the answer has them.", "source", "outcome"
)
upstream_prompt_tokens = _counter(
    "upstream_prompt_tokens", "Prompt tokens of answers whose upstream reports cached prompt tokens.", "upstream"
)
upstream_cached_prompt_tokens = _counter(
    "upstream_cached_prompt_tokens", "Prompt tokens that the upstream reports as cached.", "upstream"
)
upstream_cache_write_prompt_tokens = _counter(
    "upstream_cache_write_prompt_tokens", "Prompt tokens that the upstream reports as written to its cache.", "upstream"
)
limit_refusals = _counter("limit_refusals", "Requests that a limit of a key or team refused.", "scope", "limit")
upstream_failures = _counter("upstream_failures", "Tries that gave no answer, by what happened.", "upstream", "reason")
upstream_retries = _counter("upstream_retries", "Requests that were sent again.")
hedged_requests = _counter("hedged_requests", "Requests for which a second upstream was asked, as the first was slow.")
fallbacks = _counter("fallbacks", "Answers of another model than the one asked for.")
errors = _counter("errors", "Requests that ended with an error of the gateway.", "code")
request_seconds = _histogram(
    "request_duration_seconds", "From a request's arrival to the end of its answer.", "family", "cache"
)
first_byte_seconds = _histogram(
    "time_to_first_byte_seconds", "Until the first byte of an answer that is no hit.", "family", "cache"
)
upstream_seconds = _histogram("upstream_seconds", "How long upstreams took for a whole answer.")
upstream_first_byte_seconds = _histogram("upstream_first_byte_seconds", "Until an upstream began to answer.")


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"keepgate_{name}", text, labels, registry=registry, multiprocess_mode="livesum")


memory_entries = _gauge("memory_entries", "Entries in the memory tier.")
memory_bytes = _gauge("memory_bytes", "Bytes in the memory tier.")
redis_available = _gauge("redis_available", "Workers whose breaker to Redis is closed.")
upstream_available = _gauge(
    "upstream_available", "Workers to which an upstream is up: it can be reached, and is not left alone.", "upstream"
)
requests_in_flight = _gauge("requests_in_flight", "Requests that have arrived and are not answered yet.")
flights = _gauge("flights", "Running upstream calls that may be joined.")


def _of_host(name: str, text: str) -> Gauge:
    """A gauge that all workers of a host share: the most recent value counts."""
    return Gauge(f"keepgate_{name}", text, registry=registry, multiprocess_mode="mostrecent")


semantic_available = _of_host("semantic_available", "1 where the semantic cache answers.")
semantic_entries = _of_host("semantic_entries", "Answered questions that the semantic cache knows.")
semantic_embedder_available = _of_host(
    "semantic_embedder_available", "0 while the embedding server does not answer; always 1 without a server."
)
semantic_embedder_failures = _of_host(
    "semantic_embedder_failures", "Calls of the embedding server without a result, since the semantic cache started."
)
semantic_reembedding_left = _of_host(
    "semantic_reembedding_left", "Stored questions that have no vector of the present embedding model yet."
)
semantic_recall_at_1 = _of_host(
    "semantic_recall_at_1",
    "Share of searches whose first result is the nearest of all, of the last thousand that were compared.",
)
semantic_labels = _of_host("semantic_labels", "Judgements that the policy has learned from, as many as still count.")
semantic_delta = _of_host("semantic_delta", "The highest share of wrong answers that the settings allow.")
semantic_wrong_ratio = _of_host("semantic_wrong_ratio", "Wrong answers per request, estimated from audits.")
semantic_wrong_ratio_upper = _of_host(
    "semantic_wrong_ratio_upper", "Upper limit of the wrong answers per request, with 95 % confidence."
)
semantic_recent_wrong_ratio_upper = _of_host(
    "semantic_recent_wrong_ratio_upper",
    "Upper limit of the wrong answers per request over the last thousands of requests, with 95 % confidence.",
)


def show_policy(figures: Mapping[str, float]) -> None:
    """Copy the policy's figures; only the `budget` policy has them."""
    for gauge, name in (
        (semantic_labels, "labels"),
        (semantic_delta, "delta"),
        (semantic_wrong_ratio, "wrong"),
        (semantic_wrong_ratio_upper, "wrong_upper"),
        (semantic_recent_wrong_ratio_upper, "recent_wrong_upper"),
    ):
        if name in figures:
            gauge.set(figures[name])


def _shared_registry() -> CollectorRegistry:
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return registry
    shared = CollectorRegistry()
    MultiProcessCollector(shared)  # type: ignore[no-untyped-call]  # prometheus_client leaves it untyped
    return shared


def exposition() -> bytes:
    """All metrics of all workers in Prometheus' text format."""
    flush()
    return generate_latest(_shared_registry())


def samples() -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every sample of all workers."""
    flush()
    for metric in _shared_registry().collect():
        for sample in metric.samples:
            yield sample.name, sample.labels, sample.value


semantic_lookups = _counter("semantic_lookups", "Lookups in the semantic cache.", "outcome")
semantic_vetoes = _counter("semantic_vetoes", "Answers that only a veto kept from being served.", "veto")
semantic_audits = _counter("semantic_audits", "Semantic hits that an upstream was asked about as well.")
semantic_lookup_seconds = Histogram(
    "keepgate_semantic_lookup_seconds",
    "How long the semantic cache took to say whether it has an answer.",
    buckets=(0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.05, 0.1, 0.5),
    registry=registry,
)


_hits = {
    (family, layer): (
        requests.labels(family, "hit", layer),
        tokens_saved.labels(layer, "prompt"),
        tokens_saved.labels(layer, "completion"),
        seconds_saved.labels(layer),
    )
    for family in FAMILIES
    for layer in LAYERS
}
hits_from_memory = tier_lookups.labels("memory", "hit")


def count_hit(family: Family, entry: Entry, layer: str) -> None:
    """Count a hit; `family` is the form of API in which it was asked for."""
    hits, prompt_tokens, completion_tokens, seconds = _hits[family, layer]
    hits.inc()
    prompt_tokens.inc(entry.prompt_tokens)
    completion_tokens.inc(entry.completion_tokens)
    seconds.inc(entry.seconds)


cost_dollars = _counter("cost_dollars", "US dollars that computed answers cost.", "model", "layer")
saved_dollars = _counter("saved_dollars", "US dollars that hits and shared upstream calls saved.", "model", "layer")
team_cost_dollars = _counter("team_cost_dollars", "US dollars that the answers of a team cost.", "team")
team_saved_dollars = _counter("team_saved_dollars", "US dollars that a team's hits and shared calls saved.", "team")
engine_cost = Gauge(
    "keepgate_upstream_dollars_per_1k_tokens",
    "What a thousand tokens cost on a machine paid by the hour, as measured over ten minutes.",
    ("upstream",),
    registry=registry,
    multiprocess_mode="mostrecent",
)


class BoundedLabel:
    """The values of a label, the first hundred as they are and later ones as "other": each is a series for good."""

    def __init__(self, limit: int = 100) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def of(self, value: str, listed: Collection[str] = ()) -> str:
        """`listed` values are as they are in any case: others, which clients may invent, take no place of theirs."""
        if value in listed or value in self._known:
            return value
        if len(self._known) >= self._limit:
            return "other"
        self._known.add(value)
        return value
