"""The engine's Prometheus metrics. Names follow Prometheus' conventions; times are in seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backend.engine.async_engine import StepReport
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.stats import EngineStats
from backend.prefixes.metrics import PrefixCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEP_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_RATE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_RECENT_STEPS = 256
_RATE_SECONDS = 10.0
_TOTALS = {
    "prompt_tokens": "Prompt tokens computed.",
    "generated_tokens": "Tokens generated.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache, when their sequence joins the batch.",
    "prefix_cache_hits": "Tokens looked up in the prefix cache and found.",
    "batch_slots_used": "Sequences computed in a step, summed over the steps.",
    "computed_rows": "Tokens computed.",
    "padding_rows": "Rows added to fill up a shape that the runner has prepared.",
    "first_time_rows": "Tokens computed for the first time, not again after a preemption.",
    "preemptions": "Sequences preempted, which lost their KV blocks.",
    "deadline_exceeded": "Sequences whose deadline passed.",
    "non_finite": "Sequences for which the model produced NaN or infinity.",
    "out_of_memory": "Sequences ended because a step ran out of memory.",
}
"""Fields of ``EngineStats`` that are counters."""
_LEVELS = {
    "running_sequences": ("running", "Sequences in the batch."),
    "waiting_sequences": ("waiting", "Sequences queued."),
    "kv_blocks_free": ("free_blocks", "KV blocks that no sequence holds, including cached ones."),
    "kv_blocks_cached": ("cached_blocks", "Free KV blocks whose content can still be found."),
    "kv_blocks_held": ("held_blocks", "KV blocks held by running sequences."),
    "kv_fragmentation_ratio": ("fragmentation", "Share of slots in held blocks that hold no token."),
}
"""Gauges, and the field of ``EngineStats`` that each shows."""


_OF_DRAFTS = {
    "drafts": ("drafts", "Drafts that steps verified."),
    "draft_tokens": ("proposed_tokens", "Tokens of the drafts that steps verified."),
    "accepted_draft_tokens": ("accepted_tokens", "Tokens of drafts that became part of an answer."),
    "draft_step_seconds": ("seconds", "Time of the steps that verified drafts."),
    "draft_plain_seconds": ("plain_seconds", "Estimated time for the tokens of these steps without drafts."),
}
"""Counters by method, and the field of ``DraftCounts`` that each shows."""


class _EngineCollector(Collector):
    """Exports the latest ``EngineStats`` at each scrape, so that a step need not update every metric."""

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, help_text in _TOTALS.items():
            yield CounterMetricFamily(f"keepgate_backend_{name}", help_text, getattr(self.stats, name))
        for name, (field, help_text) in _LEVELS.items():
            yield GaugeMetricFamily(f"keepgate_backend_{name}", help_text, getattr(self.stats, field))
        for name, (field, help_text) in _OF_DRAFTS.items():
            counter = CounterMetricFamily(f"keepgate_backend_{name}", help_text, labels=["method"])
            for method, counts in self.stats.drafts.items():
                counter.add_metric([method], getattr(counts, field))
            yield counter


class Metrics:
    """Counters of one server, in a registry of their own.

    Args:
        stats: of the engine at its start.
    """

    def __init__(self, stats: EngineStats) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.prefixes = PrefixCollector()
        self.requests = Counter(
            "keepgate_backend_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=registry
        )
        self.first_token_seconds = Histogram(
            "keepgate_backend_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"keepgate_backend_{name}", help_text, buckets=buckets, registry=registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"keepgate_backend_{name}", help_text, registry=registry)

        self._queue_seconds = histogram(
            "queue_time_seconds", "From arrival to the first computed chunk of the prompt.", _LATENCY_BUCKETS
        )
        self._between_tokens = histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer.", _STEP_BUCKETS
        )
        self._answer_rates = histogram(
            "answer_tokens_per_second", "Tokens per second of one answer after its first token.", _RATE_BUCKETS
        )
        self._step_seconds = histogram("step_seconds", "Duration of a step.", _STEP_BUCKETS)
        self._failed_steps = Counter("keepgate_backend_failed_steps", "Steps that failed.", registry=registry)
        self._problems = Counter(
            "keepgate_backend_integrity_problems",
            "Inconsistencies found in the accounting of KV blocks.",
            registry=registry,
        )
        self._engine = _EngineCollector(stats)
        self.registry.register(self.prefixes)
        registry.register(self._engine)
        utilisation = gauge("batch_utilisation_ratio", "Share of the batch's slots in use, over recent steps.")
        utilisation.set_function(lambda: self._recent_share(0, 1))
        efficiency = gauge("padding_efficiency_ratio", "Share of rows computed that are tokens, over recent steps.")
        efficiency.set_function(lambda: self._recent_share(2, 3))
        first_time = gauge("first_time_rows_ratio", "Share of tokens computed for the first time, over recent steps.")
        first_time.set_function(lambda: self._recent_share(4, 2))
        gauge("tokens_per_second", "Tokens generated per second by all sequences, over the last 10 s.").set_function(
            lambda: self._rates()[1]
        )
        gauge("kv_blocks", "KV blocks in all.").set(stats.free_blocks + stats.held_blocks)
        # Recent steps: used slots, slots, rows, rows with padding, rows computed for the first time.
        self._recent: deque[tuple[int, int, int, int, int]] = deque(maxlen=_RECENT_STEPS)
        # Recent seconds: time, tokens of prompts computed, tokens generated.
        self._tokens: deque[tuple[float, int, int]] = deque()

    @property
    def stats(self) -> EngineStats:
        """The engine after its last step."""
        return self._engine.stats

    def record_step(self, report: StepReport) -> None:
        """Records a step."""
        before, stats, timings = self._engine.stats, report.stats, report.timings
        self._engine.stats = stats
        if report.computed:
            self._step_seconds.observe(report.seconds)
            slots = stats.batch_slots_used - before.batch_slots_used
            rows = stats.computed_rows - before.computed_rows
            padded = rows + stats.padding_rows - before.padding_rows
            self._recent.append((slots, stats.max_batch, rows, padded, stats.first_time_rows - before.first_time_rows))
        prefilled = stats.prompt_tokens - before.prompt_tokens
        generated = stats.generated_tokens - before.generated_tokens
        if prefilled or generated:
            self._tokens.append((time.monotonic(), prefilled, generated))
            self._drop_old()
        for histogram, values in (
            (self._queue_seconds, timings.queued),
            (self._between_tokens, timings.between_tokens),
            (self._answer_rates, timings.answer_rates),
        ):
            for value in values:
                histogram.observe(value)
        if report.failed:
            self._failed_steps.inc()
        if report.problems:
            self._problems.inc(report.problems)

    def _drop_old(self) -> None:
        oldest = time.monotonic() - _RATE_SECONDS
        while self._tokens and self._tokens[0][0] < oldest:
            self._tokens.popleft()

    def _recent_share(self, part: int, whole: int) -> float:
        recent = tuple(self._recent)
        return sum(step[part] for step in recent) / max(1, sum(step[whole] for step in recent))

    def _rates(self) -> tuple[float, float]:
        """Tokens of prompts computed, and tokens generated, per second."""
        self._drop_old()
        prefilled, generated = (sum(step[place] for step in self._tokens) for place in (1, 2))
        return prefilled / _RATE_SECONDS, generated / _RATE_SECONDS

    def status(self, bytes_per_block: int) -> dict[str, Any]:
        """What the engine does now, as ``GET /engine`` has it. Shares are of the last steps, rates of the last 10 s,
        counts since the start.
        """
        stats = self.stats
        prefill_rate, decode_rate = self._rates()
        return {
            "batch": {
                "running": stats.running,
                "waiting": stats.waiting,
                "max_batch": stats.max_batch,
                "fill": self._recent_share(0, 1),
                "padding": 1.0 - self._recent_share(2, 3) if self._recent else 0.0,
            },
            "kv_blocks": {
                "total": stats.free_blocks + stats.held_blocks,
                "held": stats.held_blocks,
                "cached": stats.cached_blocks,
                "tokens_per_block": BLOCK_SIZE,
                "bytes_per_block": bytes_per_block,
            },
            "tokens": {
                "prompt": stats.prompt_tokens,
                "generated": stats.generated_tokens,
                "prefill_per_second": prefill_rate,
                "decode_per_second": decode_rate,
            },
            "prefix_cache": {"tokens_asked": stats.prefix_cache_queries, "tokens_found": stats.prefix_cache_hits},
            "preemptions": stats.preemptions,
            "drafts": {
                method: {
                    "drafts": counts.drafts,
                    "proposed_tokens": counts.proposed_tokens,
                    "accepted_tokens": counts.accepted_tokens,
                    "speedup": counts.plain_seconds / counts.seconds if counts.seconds else 1.0,
                }
                for method, counts in stats.drafts.items()
            },
        }

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
