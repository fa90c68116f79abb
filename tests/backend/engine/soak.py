"""Random requests with random ends, for so many seconds: ``python -m tests.backend.engine.soak 3600``.

A few clients send requests to one engine with far too little memory: greedy and drawn ones, with penalties, biases,
log-probabilities, stop strings, deadlines, several answers, or for an embedding. Many leave before their answer is
whole. At the end every block must be free, and equal requests must have had equal answers. A long run is made of
rounds, each with an engine of its own: other weights, another batching policy, other limits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from backend.engine.async_engine import AsyncEngine
from backend.engine.config import Batching, BatchingMode
from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner
from backend.engine.sequence import FinishReason, SamplingParams, Sequence
from backend.errors import QueueFull
from backend.runners.fused.layout import KVPrecision
from backend.text.detokenizer import Detokenizer
from tests.backend.tiny_model import POISON, fused, keys_of, token_bytes

NUM_BLOCKS = 16
CLIENTS = 12
ROUND_SECONDS = 60.0
MAX_IN_FLIGHT = 24


# Weights, and keys and values.
PRECISIONS: tuple[tuple[str, KVPrecision], ...] = (
    ("float16", "float16"),
    ("int8", "int8"),
    ("int4", "float16"),
    ("nf4", "int8"),
    ("mixed", "float16"),
)
CHOICES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01},
)
EXTRAS: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"prompt_logprobs": 0, "logprobs": 0},
    {"presence_penalty": 0.7, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "logprobs": 1},
    {"logit_bias": {20: 4.0, 21: -100.0}},
    {"stop": ("ab", "bca")},
)


@dataclass
class Tally:
    """How requests ended, and the first answer to each."""

    seed: int
    ends: Counter[str] = field(default_factory=Counter)
    known: dict[tuple[object, ...], tuple[object, ...]] = field(default_factory=dict)
    engine: Engine | None = None


async def soak(
    seconds: float,
    seed: int,
    make: Callable[[int, str, KVPrecision], ModelRunner] = fused,
    enough: Callable[[Tally], bool] = lambda tally: False,
) -> Tally:
    """Runs one round; raises AssertionError if an answer or the bookkeeping of blocks is wrong.

    Args:
        seconds: after which no client sends another request.
        enough: ends the round earlier.
        make: makes the runner of so many blocks, with weights and KV of such precisions.
    """
    engine = _engine(random.Random(seed), make)  # noqa: S311 - repeatable
    served = AsyncEngine(engine, MAX_IN_FLIGHT, lambda report: None)
    served.start()
    tally = Tally(seed, engine=engine)
    numbers = itertools.count()
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as clients:
        for client in range(CLIENTS):
            rng = random.Random(seed * 1000 + client)  # noqa: S311 - repeatable
            clients.create_task(_client(served, rng, numbers, until, enough, tally))
    assert served.alive, "the engine's thread has ended"
    assert served.in_flight == 0
    await served.stop()
    assert engine.problems() == []
    assert not engine.has_work
    assert engine.pool.num_free == NUM_BLOCKS
    return tally


def _engine(rng: random.Random, make: Callable[[int, str, KVPrecision], ModelRunner]) -> Engine:
    precision, kv_precision = rng.choice(PRECISIONS)
    batching = Batching(rng.choice([BatchingMode.CONTINUOUS, *BatchingMode]), max_wait=0.01)
    return Engine(make(NUM_BLOCKS, precision, kv_precision), rng.randint(2, 6), rng.randint(5, 60), batching)


async def _client(
    served: AsyncEngine,
    rng: random.Random,
    numbers: itertools.count[int],
    until: float,
    enough: Callable[[Tally], bool],
    tally: Tally,
) -> None:
    while time.monotonic() < until and not enough(tally):
        sequences, identity = _request(rng, numbers)
        try:
            generation = served.submit(sequences)
        except QueueFull:
            tally.ends["refused"] += 1
            await asyncio.sleep(0.001)  # as a client that waits before it tries again
            continue
        told: list[list[object]] = [[] for _ in sequences]
        outputs_left = rng.randint(1, 10) if rng.random() < 0.4 else None
        try:
            while generation.unfinished and outputs_left != 0:
                for index, output in await generation.take():
                    told[index] += [*output.text, *output.prompt_logprobs, *output.logprobs]
                    if output.finish_reason is not None:
                        tally.ends[output.finish_reason.value] += 1
                        if output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
                            vector = None if output.embedding is None else output.embedding.tobytes()
                            reply = (tuple(told[index]), vector)
                            assert tally.known.setdefault(identity, reply) == reply, f"seed {tally.seed}: {identity}"
                outputs_left = None if outputs_left is None else outputs_left - 1
        finally:
            tally.ends["left"] += len(generation.unfinished)
            served.release(sequences, generation)


def _request(rng: random.Random, numbers: itertools.count[int]) -> tuple[list[Sequence], tuple[object, ...]]:
    """The sequences of one request, and what its answer depends on."""
    family, common, tail = rng.randrange(3), rng.choice([0, 16, 31, 32, 64, 90]), rng.randint(1, 4)
    prompt = [(family * 31 + i * 7) % 90 + 10 for i in range(common)] + [10 + rng.randrange(2) for _ in range(tail)]
    if rng.random() < 0.03:
        prompt[rng.randrange(len(prompt))] = POISON
    pooled = rng.random() < 0.1
    answer = rng.choice([1, 3, 20, 60])
    asked: dict[str, Any] = {"ignore_eos": rng.random() < 0.5, "max_tokens": 0 if pooled else answer}
    asked |= rng.choice(CHOICES) | (rng.choice(EXTRAS) if rng.random() < 0.5 else {})
    params, drawn_from = SamplingParams(**asked), rng.randrange(3)
    deadline = time.monotonic() + rng.uniform(0, 0.05) if rng.random() < 0.1 else None
    priority, tenant = rng.randrange(-1, 2), rng.choice(["", "", "tenant"])
    sequences = [
        Sequence(
            next(numbers),
            prompt,
            params,
            Detokenizer(token_bytes()),
            drawn_from,
            priority=priority,
            deadline=deadline,
            keys=keys_of(tenant),
            pooled=pooled,
        )
        for _ in range(rng.choice([1, 1, 1, 3]))
    ]
    return sequences, (tuple(prompt), pooled, drawn_from, repr(sorted(asked.items())))


def main() -> int:
    """Runs for the seconds given, 20 without an argument, and prints how the requests ended."""
    # Poisoned requests are part of the run; a line for each of thousands says nothing.
    logging.getLogger("backend.engine.engine").setLevel(logging.CRITICAL)
    until = time.monotonic() + (float(sys.argv[1]) if len(sys.argv) > 1 else 20.0)
    ends: Counter[str] = Counter()
    while (left := until - time.monotonic()) > 0:
        tally = asyncio.run(soak(min(left, ROUND_SECONDS), seed=random.SystemRandom().randrange(10**6)))
        assert tally.engine is not None
        ends += tally.ends
        print(f"seed {tally.seed}: {tally.engine.runner.name}, {dict(tally.ends)}; {tally.engine.stats()}", flush=True)
    print(f"{ends.total()} answers: {dict(ends)}; every block is free")
    return 0


if __name__ == "__main__":
    sys.exit(main())
