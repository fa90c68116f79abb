"""What each step of a request takes: measured where there is a measurement, with its source, and overridable."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

_RESULTS = "benchmarks/results"


def _figure(default: float, unit: str, source: str) -> Any:
    return field(default=default, metadata={"unit": unit, "source": source})


@dataclass(frozen=True, slots=True)
class Figures:
    """CPU time is of one core of an AMD EPYC. `source` in the metadata of each field says where it is from."""

    gateway_hit: float = _figure(
        55.6e-6, "s", f"{_RESULTS}/exact_hits.json: chat, 300 B, everything on: CPU µs per hit"
    )
    """CPU time of a gateway for a hit from its memory, with keys, limits, costs and traces on."""
    gateway_redis_hit: float = _figure(
        300e-6, "s", f"{_RESULTS}/redis_node.json: hit from Redis: CPU of Redis: gateway's CPU µs a request"
    )
    """The same for a hit that comes from Redis."""
    gateway_miss: float = _figure(
        1300e-6, "s", f"{_RESULTS}/miss_latency.json: CPU time of a miss, upstream of 50 ms, about 320 requests/s"
    )
    """The same for a miss, without what its chunks take."""
    gateway_chunk: float = _figure(53.1e-6, "s", f"{_RESULTS}/relay_cpu.json: chunks one by one")
    """The same for each chunk of a streamed miss; a chunk is a token here."""
    redis_memory_hit: float = _figure(
        0.359e-6, "s", f"{_RESULTS}/redis_node.json: hit from memory, everything on: CPU of Redis"
    )
    """CPU time of a Redis node for a hit from a gateway's memory: leases of limits, and totals."""
    redis_hit: float = _figure(37.4e-6, "s", f"{_RESULTS}/redis_node.json: hit from Redis: CPU of Redis")
    """The same for a hit that comes from there."""
    redis_miss: float = _figure(185e-6, "s", f"{_RESULTS}/redis_node.json: miss, everything on: CPU of Redis")
    """The same for a miss: its lookup, its limits, the write of its answer, totals."""
    redis_worker: float = _figure(
        3620e-6, "s/s", f"{_RESULTS}/redis_node.json: worker at rest, everything on: CPU of Redis a second"
    )
    """What each worker takes of a node in each second without any request: it asks for purges and for what others have
    routed, says that it lives, and adds up totals. The streams that it asks for are on one node."""
    semantic_lookup: float = _figure(
        4.01e-3,
        "s",
        f"{_RESULTS}/semantic_latency.json: 10,000 entries in one partition: embed, search, compare, p50",
    )
    """Time of the semantic cache's process, of which a gateway has one, for a request that the exact cache misses."""
    prefill_speed: float = _figure(12_000.0, "tokens/s", "assumed, as by `keepgate route`; measure your own backend")
    """Tokens of prompts that a backend computes in a second, one prompt after the other."""
    token: float = _figure(0.02, "s", "assumed, as by `keepgate route`; measure your own backend")
    """For each token of an answer."""
    slots: float = _figure(256, "answers", "default of `keepgate backend --max-batch` on a GPU")
    """Answers that a backend computes at the same time."""
    round_trip: float = _figure(0.2e-3, "s", "assumed: a network within one zone")
    """Between a gateway and Redis."""
    redis_deadline: float = _figure(0.02, "s", "default of the setting cache.redis_deadline")
    """How long requests wait for a Redis node that has died, once."""
    noticed_after: float = _figure(10.0, "s", "deploy/kubernetes: readiness is asked every 5 s and may fail once")
    """After how long no more requests are sent to a gateway that has died."""
    prompt_bytes: float = _figure(4.0, "bytes", "assumed: English text")
    """Of a token of a prompt."""
    chunk_bytes: float = _figure(250.0, "bytes", "benchmarks/harness/mock_upstream.py: a chunk of a stream")
    """Of a chunk of a streamed answer, and of a token of a whole one."""
    entry_bytes: float = _figure(2048.0, "bytes", "assumed: an answer of 350 tokens with its fields")
    """Of a stored answer."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many nodes there are."""

    gateways: int = 2
    workers: int = 1
    """Processes of a gateway, each on a core of its own."""
    redis: int = 1
    """Redis nodes, among which keys are divided as in a cluster; with 0 each worker has its memory alone."""
    backends: int = 4
    blocks: int = 5_000
    """Blocks of the trace that the KV cache of one backend holds."""
    memory_entries: int = 100_000
    """Answers that the memory tier of one worker holds."""
    redis_entries: int = 2_000_000
    """Answers that one Redis node holds."""


class InvalidFigure(ValueError):
    """A figure that is no such name, or no number more than 0; the message says which there are."""


def overridden(figures: Figures, given: Iterable[str]) -> Figures:
    """Figures with some in place of others, each given as NAME=NUMBER. Raises InvalidFigure."""
    names = [field.name for field in fields(Figures)]
    for text in given:
        name, _, value = text.partition("=")
        if name not in names:
            raise InvalidFigure(f"{text!r}: expected NAME=NUMBER with a name of {', '.join(names)}")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < 1e12:
            raise InvalidFigure(f"{text!r}: expected a number of 0 or more for {name}")
        if number == 0 and name in ("prefill_speed", "slots"):
            raise InvalidFigure(f"{text!r}: expected a number more than 0 for {name}")
        figures = dataclasses.replace(figures, **{name: number})
    return figures
