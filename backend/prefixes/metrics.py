"""What the prefix store reports to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backend.engine.model_runner import BLOCK_SIZE
from prefix_store.store.fetch_plan import PEERS
from prefix_store.store.open_store import OpenStore
from prefix_store.store.store import PrefixStore

_PREFIX = "keepgate_backend_prefix"
_COUNTS = {
    "hits": "Blocks restored.",
    "misses": "Blocks asked for and not restored.",
    "writes": "Blocks written.",
    "evictions": "Blocks evicted.",
    "bytes_read": "Bytes of the frames of restored blocks.",
    "read_seconds": "Time spent reading frames.",
}
_SUMS = {
    "bad_frames": "Frames that failed a check and were removed.",
    "rejected": "Blocks offered to the tier and not stored.",
    "io_errors": "Calls to the system or to a peer that failed.",
}
"""Of ``TierCounts``."""


class PrefixCollector(Collector):
    """Exports the figures of the store at each scrape, once there is one."""

    def __init__(self) -> None:
        self.opened: OpenStore | None = None

    def collect(self) -> Iterator[Metric]:
        if self.opened is None:
            return
        store = self.opened.store
        figures, places = store.figures, (*store.tiers, PEERS)
        tokens = {place: figures.restored[place] * BLOCK_SIZE for place in places}
        yield _counter("restored_tokens", "Prompt tokens restored from beyond the engine's memory.", tokens)
        yield _counter("fetched_blocks", "Blocks chosen to be fetched.", figures.fetched)
        yield _counter(
            "computed_blocks",
            "Blocks that were stored, but were computed again because that was faster.",
            figures.computed,
        )
        yield CounterMetricFamily(f"{_PREFIX}_fetch_timeouts", "Fetches ended by their deadline.", figures.late)
        yield _gauge("blocks", "Blocks stored.", {name: tier.blocks for name, tier in store.tiers.items()})
        yield _gauge(
            "bytes",
            "Bytes of the frames of stored blocks.",
            {name: tier.used_bytes for name, tier in store.tiers.items()},
        )
        yield from _of_places(store)


def _of_places(store: PrefixStore) -> Iterator[Metric]:
    counts = {name: tier.counts for name, tier in store.tiers.items()}
    if store.peers is not None:
        counts[PEERS] = store.peers.counts
    for name, help_text in _COUNTS.items():
        yield _counter(name, help_text, {place: getattr(of, name) for place, of in counts.items()})
    for name, help_text in _SUMS.items():
        yield _counter(name, help_text, {place: getattr(of, name).total() for place, of in counts.items()})


def _counter(name: str, help_text: str, values: Mapping[str, float]) -> Metric:
    metric = CounterMetricFamily(f"{_PREFIX}_{name}", help_text, labels=["tier"])
    for place, value in values.items():
        metric.add_metric([place], value)
    return metric


def _gauge(name: str, help_text: str, values: Mapping[str, float | None]) -> Metric:
    metric = GaugeMetricFamily(f"{_PREFIX}_{name}", help_text, labels=["tier"])
    for place, value in values.items():
        if value is not None:
            metric.add_metric([place], value)
    return metric
