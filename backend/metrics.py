"""What the engine reports to Prometheus. Names follow Prometheus' conventions; times are in seconds."""

from __future__ import annotations

import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from backend.async_engine import StepReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEP_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_RATE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_RECENT_STEPS = 256
_RATE_SECONDS = 10.0
_TOTALS = {
    "prompt_tokens": "Prompt tokens computed.",
    "generated_tokens": "Tokens generated.",
    "prefix_asked_tokens": "Tokens that sequences had when they joined the batch.",
    "prefix_hit_tokens": "Those of them whose keys and values were there already.",
    "batch_slots_used": "Sequences that got a chunk, summed over the steps.",
    "computed_rows": "Tokens computed.",
    "padding_rows": "Rows computed beside them, to fill up a shape that the runner has prepared.",
    "useful_rows": "Tokens computed for the first time, not again after a preemption.",
    "preemptions": "Sequences that gave their KV blocks back.",
    "expired": "Sequences whose deadline passed.",
    "poisoned": "Sequences for which the model produced values that are not numbers.",
    "shed": "Sequences ended because a step ran out of memory.",
}
"""Totals of ``EngineStats`` that are counters here."""


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

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"keepgate_backend_{name}", help_text, buckets=buckets, registry=registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"keepgate_backend_{name}", help_text, registry=registry)

        self._queue_seconds = histogram("queue_seconds", "From arrival to the first chunk.", _LATENCY_BUCKETS)
        self._between_tokens = histogram("inter_token_seconds", "Between two tokens of an answer.", _STEP_BUCKETS)
        self._answer_rates = histogram(
            "answer_tokens_per_second", "What one user sees: tokens per second after the first token.", _RATE_BUCKETS
        )
        self._step_seconds = histogram("step_seconds", "Duration of a step.", _STEP_BUCKETS)
        self._failed_steps = Counter("keepgate_backend_failed_steps", "Steps that failed.", registry=registry)
        self._problems = Counter(
            "keepgate_backend_integrity_problems", "Faults found in the books of blocks.", registry=registry
        )
        self._totals = {
            name: Counter(f"keepgate_backend_{name}", help_text, registry=registry)
            for name, help_text in _TOTALS.items()
        }
        self._seen = dict.fromkeys(_TOTALS, 0)
        self._running = gauge("running_sequences", "Sequences in the batch.")
        self._waiting = gauge("waiting_sequences", "Sequences queued.")
        self._free_blocks = gauge("kv_blocks_free", "KV blocks that nobody holds, the cached ones included.")
        self._cached_blocks = gauge("kv_blocks_cached", "Free KV blocks whose content can still be found.")
        self._held_blocks = gauge("kv_blocks_held", "KV blocks held by running sequences.")
        self._fragmentation = gauge("kv_fragmentation_ratio", "Share of slots in held blocks that hold no token.")
        utilisation = gauge("batch_utilisation_ratio", "Share of the batch's places used, over recent steps.")
        utilisation.set_function(lambda: self._recent_share(0, 1))
        efficiency = gauge("padding_efficiency_ratio", "Share of rows computed that are tokens, over recent steps.")
        efficiency.set_function(lambda: self._recent_share(2, 3))
        fresh = gauge("fresh_rows_ratio", "Share of tokens computed for the first time, over recent steps.")
        fresh.set_function(lambda: self._recent_share(4, 2))
        gauge("tokens_per_second", "What the device generates, over the last 10 s.").set_function(self._device_rate)
        gauge("kv_blocks", "KV blocks in all.").set(num_blocks)
        self._free_blocks.set(num_blocks)
        # Of recent steps: sequences, places, rows, rows with padding, useful rows.
        self._recent: deque[tuple[int, int, int, int, int]] = deque(maxlen=_RECENT_STEPS)
        # Of recent seconds: when, and how many tokens.
        self._generated: deque[tuple[float, int]] = deque()

    def note_step(self, report: StepReport) -> None:
        """Takes over what a step did."""
        stats, timings = report.stats, report.timings
        grown = {name: getattr(stats, name) - seen for name, seen in self._seen.items()}
        for name, amount in grown.items():
            self._totals[name].inc(amount)
            self._seen[name] += amount
        if report.computed:
            self._step_seconds.observe(report.seconds)
            rows = grown["computed_rows"]
            padded, useful = rows + grown["padding_rows"], grown["useful_rows"]
            self._recent.append((grown["batch_slots_used"], stats.max_batch, rows, padded, useful))
        if grown["generated_tokens"]:
            self._generated.append((time.monotonic(), grown["generated_tokens"]))
            self._drop_old()
        for histogram, values in (
            (self._queue_seconds, timings.queued),
            (self._between_tokens, timings.between_tokens),
            (self._answer_rates, timings.answer_rates),
        ):
            for value in values:
                histogram.observe(value)
        self._failed_steps.inc(int(report.failed))
        self._problems.inc(report.problems)
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._free_blocks.set(stats.free_blocks)
        self._cached_blocks.set(stats.cached_blocks)
        self._held_blocks.set(stats.held_blocks)
        self._fragmentation.set(stats.fragmentation)

    def _drop_old(self) -> None:
        oldest = time.monotonic() - _RATE_SECONDS
        while self._generated and self._generated[0][0] < oldest:
            self._generated.popleft()

    def _recent_share(self, part: int, whole: int) -> float:
        recent = tuple(self._recent)
        return sum(step[part] for step in recent) / max(1, sum(step[whole] for step in recent))

    def _device_rate(self) -> float:
        self._drop_old()
        return sum(count for _, count in self._generated) / _RATE_SECONDS

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
