"""Prefixes that are fetched late, in part or not at all change no bit of any answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.engine.engine import Engine
from backend.engine.sequence import FinishReason, Sequence
from prefix_store.codecs.codec import stored_key
from prefix_store.codecs.scaled import INT8
from tests.backend.engine.schedules import (
    Options,
    ScheduledRequest,
    assert_same_as_alone,
    run_schedule,
    schedule_pair,
    schedules,
)
from tests.backend.engine.shelf import Shelf
from tests.backend.tiny_model import EngineClient, fused

OPTIONS: st.SearchStrategy[Options] = st.fixed_dictionaries(
    {"tenant": st.sampled_from(["", "", "tenant"]), "pooled": st.sampled_from([False, False, False, True])}
)
PROMPT = [*range(20, 84)]


def lossy_key(key: bytes) -> bytes:
    return stored_key(INT8, key)


def engine_with(shelf: Shelf, num_blocks: int = 40, max_batch: int = 4, step_tokens: int = 24) -> Engine:
    shelf.engine = Engine(
        fused(num_blocks), max_batch, step_tokens, kv_connector=shelf, lossy_key=lossy_key if shelf.loss else None
    )
    return shelf.engine


def until_ended(engine: Engine, sequence: Sequence) -> None:
    """Steps until the sequence has ended, without turning the shelf."""
    while sequence.finish_reason is None:
        engine.step()


@pytest.mark.timeout(600)  # a failure is worth the five minutes that hypothesis may take to make it small
@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=schedules(OPTIONS, longest_answer=20),
    more=schedules(OPTIONS, longest_answer=20),
    max_batch=st.integers(1, 5),
    step_tokens=st.integers(1, 80),
    chance=st.randoms(use_true_random=False),
)
def test_no_fetch_changes_a_bit(
    requests: list[ScheduledRequest],
    more: list[ScheduledRequest],
    max_batch: int,
    step_tokens: int,
    chance: random.Random,
) -> None:
    """Text, log-probabilities and embeddings are bitwise those alone, whatever is fetched and saved, and whenever."""
    on, shelf = schedule_pair(), Shelf(chance)
    for some in (requests, more):  # the second engine has nothing but what the first one gave away
        shelf.engine = engine = Engine(on.runner, max_batch, step_tokens, kv_connector=shelf)
        client, left = run_schedule(engine, some, shelf)
        assert_same_as_alone(on, some, client, left)


@pytest.mark.timeout(600)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=schedules(OPTIONS, longest_answer=20),
    more=schedules(OPTIONS, longest_answer=20),
    max_batch=st.integers(1, 5),
    chance=st.randoms(use_true_random=False),
)
def test_lossy_blocks_are_never_found_as_exact(
    requests: list[ScheduledRequest], more: list[ScheduledRequest], max_batch: int, chance: random.Random
) -> None:
    """Lossy blocks, and blocks computed after them, are exact neither in the engine's memory nor in what it saves."""
    on, truth, shelf = schedule_pair(), Shelf(random.Random(0)), Shelf(chance, loss=6)  # noqa: S311
    for request in (*requests, *more):
        run_schedule(engine_with(truth), [request], truth)
    for some in (requests, more):
        shelf.engine = engine = Engine(on.runner, max_batch, 32, kv_connector=shelf, lossy_key=lossy_key)
        run_schedule(engine, some, shelf)
        for key, content in shelf.exact.items():
            assert truth.exact.get(key, content) == content
        for key, content in truth.exact.items():
            block = engine.pool.find(key)
            if block is not None:
                (segment,) = on.runner.kv_blocks.outgoing([block]).ready()[0]  # type: ignore[union-attr]
                assert np.ascontiguousarray(segment).tobytes() == content


def test_a_second_engine_computes_only_the_tail() -> None:
    """A second engine fetches the blocks of the first one and computes only the rest, at least the last token."""
    shelf = Shelf(random.Random(1), reliable=True)  # noqa: S311
    first = EngineClient(engine_with(shelf), shelf)
    first.submit(0, PROMPT, 20, ignore_eos=True)
    first.run()
    assert len(shelf.exact) == (len(PROMPT) + 19) // 16
    second = EngineClient(engine_with(shelf), shelf)
    same = second.submit(0, PROMPT, 20, ignore_eos=True)
    second.run()
    assert second.completions[0].content == first.completions[0].content
    assert shelf.fetched == 3, "of four blocks the last has the last token"
    assert same.num_cached == 48
    stats = second.engine.stats()
    assert (stats.prompt_tokens, stats.prefix_cache_hits) == (16, 48)


def test_others_decode_while_a_prefix_is_fetched() -> None:
    """Other sequences decode while one waits for its prefix to be fetched."""
    shelf = Shelf(random.Random(2), reliable=True)  # noqa: S311
    client = EngineClient(engine_with(shelf), shelf)
    client.submit(0, PROMPT, 1)
    client.run()
    client = EngineClient(engine_with(shelf), shelf)
    client.submit(1, [*range(30, 40)], 20, ignore_eos=True)
    waiting = client.submit(2, PROMPT, 5, ignore_eos=True)
    for _ in range(10):
        client.engine.step()
    assert waiting.fetch is not None
    assert waiting.num_computed == 0
    other = client.completions[1].sequence
    assert other.num_generated == 10
    client.run()
    assert waiting.num_cached == 48


def test_equal_prompts_wait_for_one_fetch() -> None:
    """One fetch serves all sequences with the same prompt."""
    shelf = Shelf(random.Random(3), reliable=True)  # noqa: S311
    client = EngineClient(engine_with(shelf), shelf)
    client.submit(0, PROMPT, 1)
    client.run()
    client = EngineClient(engine_with(shelf), shelf)
    asked = [client.submit(number, PROMPT, 4, ignore_eos=True) for number in range(3)]
    client.run()
    assert shelf.fetched == 3
    assert [sequence.num_cached for sequence in asked] == [48] * 3


def test_an_engine_that_only_waits_for_a_fetch_rests() -> None:
    """An engine whose sequences all wait for a fetch has no work until the fetch ends or another request arrives."""
    shelf = Shelf(random.Random(4), reliable=True)  # noqa: S311
    client = EngineClient(engine_with(shelf), shelf)
    client.submit(0, PROMPT, 1)
    client.run()
    client = EngineClient(engine_with(shelf), shelf)
    client.submit(1, PROMPT, 1)
    client.submit(2, PROMPT, 1)
    assert client.engine.seconds_until_work() == 0.0
    client.engine.step()
    assert client.engine.seconds_until_work() is None, "both wait for one fetch"
    client.submit(3, [11, 12], 1)
    assert client.engine.seconds_until_work() == 0.0
    client.engine.step()
    assert client.completions[3].sequence.finish_reason is FinishReason.LENGTH
    shelf.turn()
    assert client.engine.seconds_until_work() == 0.0
    client.run()


def test_an_abort_during_a_fetch_frees_its_blocks_at_once() -> None:
    """An abort during a fetch frees the blocks at once, and data that still arrives is written nowhere."""
    shelf = Shelf(random.Random(5), reliable=True)  # noqa: S311
    client = EngineClient(engine_with(shelf), shelf)
    client.submit(0, PROMPT, 1)
    client.run()
    engine = engine_with(shelf, num_blocks=5)
    client = EngineClient(engine, shelf)
    client.submit(1, PROMPT, 1)
    engine.step()
    engine.abort(1)
    assert engine.pool.num_free == 5
    other = client.submit(2, [*range(30, 94)], 8, ignore_eos=True)
    until_ended(engine, other)
    shelf.turn()
    assert shelf.halted == 1
    assert shelf.fetched == 0
    assert engine.problems() == []


def test_the_blocks_of_an_answer_are_saved_too() -> None:
    """The blocks of an answer are saved too, so the next turn of a conversation finds question and answer."""
    shelf = Shelf(random.Random(6), reliable=True)  # noqa: S311
    client = EngineClient(engine_with(shelf), shelf)
    turn = client.submit(0, PROMPT, 40, ignore_eos=True)
    client.run()
    again = EngineClient(engine_with(shelf), shelf)
    follow_up = again.submit(0, [*turn.tokens, 11, 12], 1)
    again.run()
    assert follow_up.num_cached == (len(turn.tokens) - 1) // 16 * 16


def test_blocks_beyond_the_copy_limit_are_saved_later() -> None:
    """The engine holds a quarter of its blocks for saving at most, and saves the others later from the pool."""
    shelf = Shelf(random.Random(7), reliable=True)  # noqa: S311
    engine = engine_with(shelf, num_blocks=9)
    client = EngineClient(engine, shelf)
    sequence = client.submit(0, PROMPT, 1)
    until_ended(engine, sequence)
    assert engine.pool.num_held == 2
    assert engine.problems() == []
    shelf.finish()
    assert len(shelf.exact) == len(PROMPT) // 16
    assert engine.pool.num_held == 0


def test_an_engine_waits_for_blocks_that_are_being_saved() -> None:
    """A request that needs blocks being saved joins as soon as they are free, and the engine is idle until then."""
    shelf = Shelf(random.Random(8), reliable=True)  # noqa: S311
    engine = engine_with(shelf, num_blocks=5)
    client = EngineClient(engine, shelf)
    first = client.submit(0, PROMPT, 1)
    until_ended(engine, first)
    assert engine.pool.num_held == 1
    other = client.submit(1, [*range(26, 96)], 2, ignore_eos=True)
    engine.step()
    assert not other.blocks
    assert engine.seconds_until_work() is None
    shelf.turn()
    assert engine.seconds_until_work() == 0.0
    client.run()
    assert other.num_generated == 2


def test_forgotten_prefixes_are_not_saved() -> None:
    """`forget_prefixes` stops saves that run, saves that wait, and saves of answers that still run."""
    shelf = Shelf(random.Random(9), reliable=True)  # noqa: S311
    engine = engine_with(shelf, num_blocks=20)
    client = EngineClient(engine, shelf)
    ended = client.submit(0, PROMPT, 1)
    running = client.submit(1, [*range(30, 94)], 40, ignore_eos=True)
    while ended.finish_reason is None or running.num_generated < 5:
        engine.step()
    assert shelf.is_waited_for
    engine.forget_prefixes()
    shelf.finish()
    while engine.has_work:
        engine.step()
    shelf.finish()
    assert not shelf.exact
    assert engine.problems() == []
    assert engine.pool.num_held == 0


@pytest.mark.parametrize(("all_of_it", "taken"), [(True, [0, 0]), (False, [0, 48])])
def test_blocks_forgotten_while_they_are_fetched_are_not_used(
    all_of_it: bool, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetched blocks that were forgotten meanwhile are not used, and those of another chain are."""
    shelf = Shelf(random.Random(11), reliable=True)  # noqa: S311
    prompts = [PROMPT, [*range(30, 94)]]
    told: list[Callable[[], None]] = []
    for is_second in (False, True):
        client = EngineClient(engine := engine_with(shelf), shelf)
        asked = [client.submit(number, prompt, 4, ignore_eos=True) for number, prompt in enumerate(prompts)]
        if is_second:
            engine.step()
            with monkeypatch.context() as later:
                later.setattr(engine, "fetched", lambda *given: told.append(partial(Engine.fetched, engine, *given)))
                shelf.turn()
            engine.forget_prefixes() if all_of_it else engine.forget_blocks(asked[0].block_keys)
            for tell in told:
                tell()
        client.run()
        assert [sequence.num_cached for sequence in asked] == (taken if is_second else [0, 0])
    assert len(told) == len(prompts)


def test_full_staging_memory_only_delays_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full staging memory delays saving, and the engine tries again only when a sequence ends."""
    shelf = Shelf(random.Random(10), reliable=True)  # noqa: S311
    engine = engine_with(shelf, num_blocks=40)
    client = EngineClient(engine, shelf)
    blocks = engine.runner.kv_blocks
    assert blocks is not None
    with monkeypatch.context() as full:
        asked: list[int] = []
        full.setattr(blocks, "outgoing", lambda some: asked.append(len(some)))
        for number in range(3):
            sequence = client.submit(number, [*range(20 + number, 84 + number)], 1)
            until_ended(engine, sequence)
        assert len(asked) == 4, "once, and at each end"
    last = client.submit(9, [*range(30, 94)], 1)
    until_ended(engine, last)
    shelf.finish()
    assert len(shelf.exact) == 4 * 4
