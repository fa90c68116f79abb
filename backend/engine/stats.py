"""Counters and timings of the engine, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepTimings:
    """Durations that a step measured, in seconds."""

    queued: list[float] = field(default_factory=list)
    """From arrival to the first chunk, for each sequence that began."""
    between_tokens: list[float] = field(default_factory=list)
    """Since the sequence's last token, for each sequence that got another one."""
    answer_rates: list[float] = field(default_factory=list)
    """Tokens per second after the first token, for each answer of at least two tokens that its caller waited for."""


@dataclass(slots=True)
class DraftCounts:
    """What became of the drafts of one method."""

    drafts: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0
    """Of the steps that verified them."""
    plain_seconds: float = 0.0
    """Estimated for as many tokens without drafts."""


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    prompt_tokens: int = 0
    """Prompt tokens computed, recomputation after a preemption included."""
    generated_tokens: int = 0
    steps: int = 0
    batch_slots_used: int = 0
    """Sequences that got a chunk, summed over the steps; at most ``steps * max_batch``."""
    computed_rows: int = 0
    """Tokens given to the runner."""
    first_time_rows: int = 0
    """Computed rows without those that a preemption had thrown away."""
    padding_rows: int = 0
    """Rows that the runner computed beside those, to fill up a shape that it has prepared."""
    deadline_exceeded: int = 0
    non_finite: int = 0
    """Sequences ended because the model produced values that are not numbers."""
    out_of_memory: int = 0
    """Sequences ended because a step ran out of memory."""
    drafts: dict[str, DraftCounts] = field(default_factory=dict)
    """By method."""


@dataclass(slots=True, kw_only=True)
class EngineStats(Totals):
    """Snapshot of the engine after a step: its totals and its current state."""

    running: int
    waiting: int
    max_batch: int
    step_tokens: int
    deterministic: bool
    """Whether a greedy answer is bitwise the same in any schedule; the runner's promise."""
    free_blocks: int
    """Blocks without a reference, the cached ones included."""
    cached_blocks: int
    held_blocks: int
    fragmentation: float
    """Share of the slots in held blocks that belong to no token."""
    prefix_cache_queries: int
    """Tokens that sequences had when they joined the batch."""
    prefix_cache_hits: int
    """Those of them that were in the prefix cache."""
    preemptions: int
