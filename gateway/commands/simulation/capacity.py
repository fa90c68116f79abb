"""The capacity model: what a request takes of each kind of node, and from that what a rate needs. Without queues.

The work that a request brings to a kind of node, times requests a second, divided by nodes, is the share of time in
which each node works (the utilisation law). Nodes are planned to work `planned` of the time: beyond that, waiting grows
as 1 / (1 - utilisation).
"""

import math
from dataclasses import dataclass

from gateway.commands.simulation.figures import Figures, Fleet
from gateway.commands.simulation.run import Result

PLANNED = 0.6
"""The share of time in which nodes are planned to work."""
_BLOCK_TEXT, _BLOCK_NUMBER = 1024, 8
"""Bytes of a prompt's text that are a block of the routing history, and of the number that stands for one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a request is like, on average. Shares are of all requests."""

    memory: float
    redis: float
    semantic: float
    flight: float
    miss: float
    has_semantic: bool
    prompt_tokens: float
    answer_tokens: float
    missed_answer_tokens: float
    computed_tokens: float
    """Tokens of prompts that a backend computes, of a miss."""
    streamed: float
    """The share of answers that are streams."""

    @classmethod
    def of(cls, result: Result, streamed: float) -> "Workload":
        """As a simulation has found it."""
        shares = {name: result.layers[name] for name in ("memory", "redis", "semantic", "flight", "miss")}
        return cls(
            **shares,
            has_semantic="semantic" in result.loads,
            prompt_tokens=result.prompt_tokens,
            answer_tokens=result.answer_tokens,
            missed_answer_tokens=result.missed_answer_tokens,
            computed_tokens=result.computed_tokens,
            streamed=streamed,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What a request takes on average, in seconds of one node."""

    gateway: float
    """Of a core."""
    redis: float
    semantic: float
    prefill: float
    slot: float
    """Of one slot of a backend, without waiting."""


def work_of(workload: Workload, figures: Figures) -> Work:
    """What a request takes of each kind of node."""
    beyond_memory = workload.redis + workload.semantic + workload.flight + workload.miss
    beyond_redis = workload.semantic + workload.flight + workload.miss
    prefill = workload.miss * workload.computed_tokens / figures.prefill_speed
    chunks = workload.missed_answer_tokens * workload.streamed * figures.gateway_chunk
    # What a lookup takes is part of a hit from Redis and of a miss; others have it besides.
    lookup = figures.gateway_redis_hit / 2
    return Work(
        gateway=workload.memory * figures.gateway_hit
        + workload.redis * figures.gateway_redis_hit
        + (workload.semantic + workload.flight) * (lookup + figures.gateway_hit)
        + workload.miss * (max(figures.gateway_miss, figures.gateway_redis_hit) + chunks),
        redis=workload.memory * figures.redis_memory_hit
        + beyond_memory * figures.redis_hit
        + workload.miss * max(0.0, figures.redis_miss - figures.redis_hit),
        semantic=beyond_redis * figures.semantic_lookup if workload.has_semantic else 0.0,
        prefill=prefill,
        slot=prefill + workload.miss * workload.missed_answer_tokens * figures.token,
    )


def utilisations(rate: float, workload: Workload, figures: Figures, fleet: Fleet) -> dict[str, float]:
    """The share of time in which nodes of each kind work, at so many requests a second."""
    work = work_of(workload, figures)
    shares = {"gateway": rate * work.gateway / (fleet.gateways * fleet.workers)}
    if fleet.redis:
        upkeep = fleet.gateways * fleet.workers * figures.redis_worker
        shares["redis"] = (rate * work.redis + upkeep) / fleet.redis
    if workload.has_semantic:
        shares["semantic"] = rate * work.semantic / fleet.gateways
    prefill = rate * work.prefill / fleet.backends
    shares["backend"] = max(prefill, rate * work.slot / fleet.backends / figures.slots)
    return shares


@dataclass(frozen=True, slots=True)
class Need:
    """What a rate needs, with nodes that work `planned` of the time."""

    rate: float
    """Requests a second."""
    gateway_cores: int
    """Workers, each on a core."""
    redis: int
    """Nodes; at least 1. Replicas, for when one dies, are besides."""
    semantic: int
    """Processes of the semantic cache."""
    backends: int
    limited_by: str
    """What backends have least of: prompts, or slots."""
    client_bits: float
    """Bits a second between clients and gateways, both ways."""
    backend_bits: float
    """The same between gateways and backends."""
    redis_bits: float
    """The same between gateways and Redis, of answers."""
    routing_bits: float
    """Bits a second that workers read of what all have routed, from one node, where the strategy is prefix-aware."""
    upkeep: float
    """The share of its time that the one Redis node works which has the streams that all workers follow."""


def needed(rate: float, workload: Workload, figures: Figures, planned: float = PLANNED) -> Need:
    """What it takes to answer so many requests a second."""
    work = work_of(workload, figures)
    prefill, slots = rate * work.prefill / planned, rate * work.slot / figures.slots / planned
    prompt = workload.prompt_tokens * figures.prompt_bytes
    answer = workload.answer_tokens * figures.chunk_bytes
    missed = workload.missed_answer_tokens * figures.chunk_bytes
    stored = workload.redis + workload.miss
    cores = max(1, math.ceil(rate * work.gateway / planned))
    upkeep = cores * figures.redis_worker
    return Need(
        rate=rate,
        gateway_cores=cores,
        redis=max(1, math.ceil((rate * work.redis + upkeep) / planned)),
        semantic=math.ceil(rate * work.semantic / planned),
        backends=max(1, math.ceil(max(prefill, slots))) if workload.miss else 0,
        limited_by="prompts" if prefill >= slots else "slots",
        client_bits=8 * rate * (prompt + answer),
        backend_bits=8 * rate * workload.miss * (prompt + missed),
        redis_bits=8 * rate * stored * figures.entry_bytes,
        routing_bits=8 * cores * rate * workload.miss * prompt / _BLOCK_TEXT * _BLOCK_NUMBER,
        upkeep=upkeep,
    )
