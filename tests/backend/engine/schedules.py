"""Random schedules of requests, and what each request gets when it runs alone."""

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
"""Too few for the requests that run at the same time."""
_LAST_ARRIVAL = 12

Options = dict[str, Any]


@dataclass(frozen=True)
class ScheduledRequest:
    """One request: the step in which it arrives, its options, and after how many outputs its client leaves."""

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


def schedules(options: st.SearchStrategy[Options], longest_answer: int) -> st.SearchStrategy[list[ScheduledRequest]]:
    """Up to eight requests with such options and different priorities."""
    requests = st.builds(
        ScheduledRequest,
        arrives=st.integers(0, _LAST_ARRIVAL),
        prompt=_PROMPTS,
        answer=st.integers(0, longest_answer),
        options=st.builds(lambda chosen, priority: {**chosen, "priority": priority}, options, st.integers(0, 1)),
        leaves_after=st.none() | st.integers(1, 6),
    )
    # What is pooled generates nothing.
    requests = requests.map(
        lambda request: dataclasses.replace(request, answer=0) if request.options.get("pooled") else request
    )
    return st.lists(requests, min_size=1, max_size=8)


@dataclass(frozen=True)
class SchedulePair:
    """A runner for requests that run together, and another one for each request alone."""

    runner: ModelRunner
    _alone_runner: ModelRunner
    _known: dict[str, Completion] = field(default_factory=dict)

    def expected(self, number: int, request: ScheduledRequest) -> Completion:
        """The expected completion of a request; neither its priority nor its tenant changes it."""
        options = {name: value for name, value in request.options.items() if name not in ("priority", "tenant")}
        seed = number if "temperature" in options else 0
        key = repr((seed, request.prompt, request.answer, options))
        if key not in self._known:
            self._known[key] = alone(self._alone_runner, list(request.prompt), request.answer, number=seed, **options)
        return self._known[key]


@functools.cache
def schedule_pair(precision: str = "float16", kv_precision: KVPrecision = "float16") -> SchedulePair:
    """The pair of runners for these precisions of weights and KV."""
    return SchedulePair(fused(NUM_BLOCKS, precision, kv_precision), fused(NUM_BLOCKS, precision, kv_precision))


def run_schedule(
    engine: Engine, requests: list[ScheduledRequest], shelf: Shelf | None = None
) -> tuple[EngineClient, set[int]]:
    """Runs a schedule to its end; returns the client and the numbers of the requests whose client left early."""
    client = EngineClient(engine, shelf)
    outputs_of = dict.fromkeys(range(len(requests)), 0)
    left: set[int] = set()
    now = 0
    while now <= _LAST_ARRIVAL or engine.has_work:
        for number, request in enumerate(requests):
            if request.arrives == now:
                client.submit(number, list(request.prompt), request.answer, **request.options)
        for output in client.step():
            number = output.sequence_id
            outputs_of[number] += 1
            if outputs_of[number] == requests[number].leaves_after and output.finish_reason is None:
                engine.abort(number)
                left.add(number)
        now += 1
    if shelf is not None:
        shelf.finish()
    assert engine.pool.num_free == engine.pool.num_blocks
    return client, left


def assert_same_as_alone(
    on: SchedulePair, requests: list[ScheduledRequest], client: EngineClient, left: set[int]
) -> None:
    """Completed requests are bitwise what they are alone, embeddings included; the others are a prefix of it."""
    for number, request in enumerate(requests):
        completion, expected = client.completions[number], on.expected(number, request)
        if number in left:
            assert expected.text.startswith(completion.text)
            assert expected.logprobs[: len(completion.logprobs)] == completion.logprobs
            continue
        assert completion.content == expected.content
        assert _bits(completion) == _bits(expected)
        assert (_bits(completion) is not None) == bool(request.options.get("pooled"))


def _bits(completion: Completion) -> bytes | None:
    if completion.last is None or completion.last.embedding is None:
        return None
    return completion.last.embedding.tobytes()
