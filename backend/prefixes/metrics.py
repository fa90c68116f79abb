"""What the prefix store reports to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backend.engine.model_runner import BLOCK_SIZE
from prefix_store.store.metrics import store_metrics
from prefix_store.store.open_store import OpenStore

_PREFIX = "keepgate_backend_prefix"


class PrefixCollector(Collector):
    """Exports the figures of the store at each scrape, once there is one."""

    def __init__(self) -> None:
        self.opened: OpenStore | None = None

    def collect(self) -> Iterator[Metric]:
        if self.opened is None:
            return
        store = self.opened.store
        for figure in store_metrics(store, BLOCK_SIZE):
            family = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
            metric = family(f"{_PREFIX}_{figure.name}", figure.help, labels=["tier"])
            for place, value in figure.values.items():
                metric.add_metric([place], value)
            yield metric
        late = store.figures.late
        yield CounterMetricFamily(f"{_PREFIX}_fetch_timeouts", "Fetches ended by their deadline.", late)
