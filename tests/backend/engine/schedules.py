"""Random requests that come and go as they like, and what each of them gets when it is alone."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner
from backend.runners.fused.layout import KVPrecision
from tests.backend.engine.shelf import Shelf
from tests.backend.tiny_model import Completion, EngineClient, alone, fused

NUM_BLOCKS = 9
"""Too few for what is asked for at the same time."""
_LAST_ARRIVAL = 12

Options = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """One request: when it comes, what it asks, and after how many of its outputs its client leaves."""

    arrives: int
    prompt: tuple[int, ...]
    answer: int
    options: Options
    leaves_after: int | None


# Few beginnings, so that prompts have whole blocks in common, and few different ends.
_PROMPTS = st.builds(
    lambda family, common, tail: tuple((family * 31 + i * 7) % 90 + 10 for i in range(common)) + tuple(tail),
    st.integers(0, 1),
    st.sampled_from([0, 15, 16, 17, 32, 48, 60]),
    st.lists(st.integers(10, 12), min_size=1, max_size=20),
)


def schedules(options: st.SearchStrategy[Options], longest_answer: int) -> st.SearchStrategy[list[Ask]]:
    """Up to eight requests with such options, each of them more or less urgent."""
    asks = st.builds(
        Ask,
        arrives=st.integers(0, _LAST_ARRIVAL),
        prompt=_PROMPTS,
        answer=st.integers(0, longest_answer),
        options=st.builds(lambda chosen, priority: {**chosen, "priority": priority}, options, st.integers(0, 1)),
        leaves_after=st.none() | st.integers(1, 6),
    )
    # What is pooled generates nothing.
    asks = asks.map(lambda ask: dataclasses.replace(ask, answer=0) if ask.options.get("pooled") else ask)
    return st.lists(asks, min_size=1, max_size=8)


@dataclass(frozen=True)
class Stage:
    """Where requests run together, and a place with memory of its own where each of them runs alone."""

    runner: ModelRunner
    _quiet: ModelRunner
    _known: dict[str, Completion] = field(default_factory=dict)

    def expected(self, number: int, ask: Ask) -> Completion:
        """What the request with this number is to get: how urgent it was, and who might share with it, is nothing."""
        options = {name: value for name, value in ask.options.items() if name not in ("priority", "tenant")}
        seed = number if "temperature" in options else 0
        key = repr((seed, ask.prompt, ask.answer, options))
        if key not in self._known:
            self._known[key] = alone(self._quiet, list(ask.prompt), ask.answer, number=seed, **options)
        return self._known[key]


@functools.cache
def stage(precision: str = "float16", kv_precision: KVPrecision = "float16") -> Stage:
    """The one stage for weights, and for keys and values, of such precisions."""
    return Stage(fused(NUM_BLOCKS, precision, kv_precision), fused(NUM_BLOCKS, precision, kv_precision))


def play(engine: Engine, asks: list[Ask], shelf: Shelf | None = None) -> tuple[EngineClient, set[int]]:
    """Lets requests come and leave in their steps, until nothing is left; returns those who have left too."""
    client = EngineClient(engine, shelf)
    outputs_of = dict.fromkeys(range(len(asks)), 0)
    left: set[int] = set()
    now = 0
    while now <= _LAST_ARRIVAL or engine.has_work:
        for number, ask in enumerate(asks):
            if ask.arrives == now:
                client.submit(number, list(ask.prompt), ask.answer, **ask.options)
        for output in client.step():
            number = output.sequence_id
            outputs_of[number] += 1
            if outputs_of[number] == asks[number].leaves_after and output.finish_reason is None:
                engine.abort(number)
                left.add(number)
        now += 1
    if shelf is not None:
        shelf.finish()
    assert engine.pool.num_free == engine.pool.num_blocks
    return client, left


def assert_as_alone(on: Stage, asks: list[Ask], client: EngineClient, left: set[int]) -> None:
    """Who stayed to the end has every bit of what it gets alone, embeddings included; who left has its beginning."""
    for number, ask in enumerate(asks):
        completion, expected = client.completions[number], on.expected(number, ask)
        if number in left:
            assert expected.text.startswith(completion.text)
            assert expected.logprobs[: len(completion.logprobs)] == completion.logprobs
            continue
        assert completion.content == expected.content
        assert _bits(completion) == _bits(expected)
        assert (_bits(completion) is not None) == bool(ask.options.get("pooled"))


def _bits(completion: Completion) -> bytes | None:
    if completion.last is None or completion.last.embedding is None:
        return None
    return completion.last.embedding.tobytes()
