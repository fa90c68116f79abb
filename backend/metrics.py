"""What the engine reports to Prometheus. Names follow Prometheus' conventions; times are in seconds."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from backend.async_engine import StepReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self, num_blocks: int) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "keepgate_backend_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=registry
        )
        self.first_token_seconds = Histogram(
            "keepgate_backend_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self._prompt_tokens = Counter("keepgate_backend_prompt_tokens", "Prompt tokens computed.", registry=registry)
        self._generated_tokens = Counter("keepgate_backend_generated_tokens", "Tokens generated.", registry=registry)
        self._preemptions = Counter(
            "keepgate_backend_preemptions", "Sequences that gave their KV blocks back.", registry=registry
        )
        self._failed_steps = Counter("keepgate_backend_failed_steps", "Steps that failed.", registry=registry)
        self._step_seconds = Histogram(
            "keepgate_backend_step_seconds", "Duration of a step.", buckets=_STEP_BUCKETS, registry=registry
        )
        self._running = Gauge("keepgate_backend_running_sequences", "Sequences in the batch.", registry=registry)
        self._waiting = Gauge("keepgate_backend_waiting_sequences", "Sequences queued.", registry=registry)
        self._free_blocks = Gauge("keepgate_backend_kv_blocks_free", "KV blocks free.", registry=registry)
        blocks = Gauge("keepgate_backend_kv_blocks", "KV blocks in all.", registry=registry)
        blocks.set(num_blocks)
        self._free_blocks.set(num_blocks)
        self._seen = (0, 0, 0)

    def note_step(self, report: StepReport) -> None:
        """Takes over what a step did."""
        stats = report.stats
        totals = (stats.prompt_tokens, stats.generated_tokens, stats.preemptions)
        counters = (self._prompt_tokens, self._generated_tokens, self._preemptions)
        for counter, total, seen in zip(counters, totals, self._seen, strict=True):
            counter.inc(total - seen)
        self._seen = totals
        if report.computed:
            self._step_seconds.observe(report.seconds)
        self._failed_steps.inc(int(report.failed))
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._free_blocks.set(stats.free_blocks)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
