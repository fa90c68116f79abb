"""The store's figures on their way to vLLM's Prometheus endpoint. Imports vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from prefix_store.connectors.scheduler import SchedulerSide
from prefix_store.connectors.worker import WorkerSide
from prefix_store.store.metrics import StoreMetric, store_metrics

_PREFIX = "keepgate_prefix"
_HELP = {
    "bypassed_requests": "Requests left alone: with a LoRA adapter, prompt embeddings or an image at their start.",
    "late_lookups": "Look-ups not answered in time; the prompts were computed.",
    "dropped": "Blocks not saved, because too many were waiting.",
    "failed_loads": "Blocks that were announced and not loaded; they were computed.",
    "audited": "Stored prefixes that were computed and compared.",
    "drifted": "Stored prefixes that were not what the engine computes, and were removed.",
    "void": "Audits without a comparison, because the blocks had gone.",
    "fetch_timeouts": "Fetches ended by their deadline.",
}


class StoreStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What has changed since the last step, of all workers: ``counters`` and ``gauges``, by "name worker tier"."""

    def reset(self) -> None:
        self.data: dict[str, dict[str, float]] = {"counters": {}, "gauges": {}}

    def aggregate(self, other: StoreStats) -> StoreStats:
        """Adds figures of another worker, or of a later step."""
        for name, value in other.data["counters"].items():
            self.data["counters"][name] = self.data["counters"].get(name, 0) + value
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: counters of all workers together, and what each of them holds."""
        found: dict[str, int | float] = {}
        for name, value in self.data["counters"].items():
            metric, _, tier = name.split(" ")
            called = f"{metric}_{tier}".strip("_")
            found[called] = found.get(called, 0) + value
        return {**found, **{"_".join(name.split()): value for name, value in self.data["gauges"].items()}}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class StoreReporter:
    """Makes statistics of what has changed in these metrics of a worker, or of the scheduler, which has no number."""

    def __init__(self, metrics: Callable[[], Iterable[StoreMetric]], worker: str = "") -> None:
        self._metrics = metrics
        self._worker = worker
        self._told: dict[str, float] = {}

    def changes(self) -> StoreStats | None:
        """Since the last call; None: nothing has."""
        counters: dict[str, float] = {}
        gauges: dict[str, float] = {}
        new: dict[str, float] = {}
        for metric in self._metrics():
            for tier, value in metric.values.items():
                name = f"{metric.name} {self._worker} {tier}"
                told = self._told.get(name, 0)
                if value == told:
                    continue
                new[name] = value
                if metric.is_counter:
                    counters[name] = value - told
                else:
                    gauges[name] = value
        self._told.update(new)
        return StoreStats(data={"counters": counters, "gauges": gauges}) if new else None


def worker_metrics(worker: WorkerSide, block_size: int) -> Iterator[StoreMetric]:
    """Of a worker and its store, whose blocks have so many tokens."""
    store = worker.opened.store
    yield from store_metrics(store, block_size)
    figures = {**asdict(worker.figures), "fetch_timeouts": store.figures.late}
    yield from (StoreMetric(name, _HELP[name], {"": value}) for name, value in figures.items() if name in _HELP)


def scheduler_metrics(scheduler: SchedulerSide) -> Iterator[StoreMetric]:
    """Of the scheduler's side."""
    figures = {"bypassed_requests": scheduler.bypassed.total(), "late_lookups": scheduler.late}
    yield from (StoreMetric(name, _HELP[name], {"": value}) for name, value in figures.items())


class StorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters and gauges ``keepgate_prefix_…`` with the labels ``worker`` and ``tier``, beside vLLM's own labels."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._families: dict[str, Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what has changed."""
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for kind, make in (("counters", self._counter_cls), ("gauges", self._gauge_cls)):
            for name, value in transfer_stats_data.get(kind, {}).items():
                metric, worker, tier = name.split(" ")
                child = self._family(metric, make).labels(*labels, worker, tier)
                if kind == "counters":
                    child.inc(value)
                else:
                    child.set(value)

    def _family(self, name: str, make: Any) -> Any:
        if name not in self._families:
            help_text = _HELP.get(name, "See docs/guides/vllm.md.")
            self._families[name] = make(
                name=f"{_PREFIX}_{name}", documentation=help_text, labelnames=[*self._labelnames, "worker", "tier"]
            )
        return self._families[name]
