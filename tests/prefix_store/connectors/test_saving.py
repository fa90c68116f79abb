"""What is saved: prompts and answers, in order, from blocks that are still the request's."""

import itertools
import threading
from collections.abc import Sequence

import pytest

from prefix_store.connectors import worker
from prefix_store.connectors.transfers import Audit, Load, Save, StepPlan
from prefix_store.frames.segments import Segments
from tests.prefix_store.connectors.conftest import Start
from tests.prefix_store.connectors.paged_engine.engine import Request, Status
from tests.prefix_store.connectors.paged_engine.faults import blocked_loop, files_of, hanging
from tests.prefix_store.connectors.paged_engine.prompts import prompt_of
from tests.prefix_store.connectors.paged_engine.toy_model import BLOCK, answer_of


@pytest.mark.parametrize("length", [1, 3, 4, 5, 21])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_second_turn_of_a_conversation_finds_the_first_answer(start: Start, length: int, depth: int) -> None:
    """Blocks of an answer are stored as it grows, also where the prompt alone fills none."""
    prompt = prompt_of(length)
    engine = start(depth=depth, shares=False)
    request = engine.ask(prompt, max_tokens=14)
    # The last token's keys and values are not computed.
    known = (length + len(request.answer) - 1) // BLOCK * BLOCK
    assert known > length // BLOCK * BLOCK
    assert engine.ask(prompt + request.answer + prompt_of(9)).loaded == known


def test_what_is_stored_already_is_not_saved_again(start: Start) -> None:
    """Only the new blocks of a longer prompt are handed to the workers."""
    prompt = prompt_of(40)
    engine = start(shares=False)
    engine.ask(prompt, max_tokens=1)
    assert engine.planned_saves == 10
    engine.ask(prompt + prompt_of(8), max_tokens=1)
    assert engine.planned_saves == 12


def test_the_same_prompt_twice_at_once_is_stored_once(start: Start) -> None:
    """Two requests compute and save the same blocks side by side; both are right, and so is what is stored."""
    prompt = prompt_of(37)
    engine = start(shares=False, memory_bytes=2**16, disk=True)
    for name in ("one", "other"):
        engine.add(Request(name, prompt))
    engine.run()
    assert engine.planned_saves == 18
    assert {tier.counts.writes for tier in engine.workers.ranks[0].side.opened.store.tiers.values()} == {9}
    assert engine.ask(prompt).loaded == 36


def test_a_long_prompt_is_saved_in_chunks_as_it_is_computed(start: Start) -> None:
    """A prompt of several steps is stored before it is complete."""
    prompt = prompt_of(60)
    engine = start(step_tokens=16, shares=False)
    request = engine.add(Request("long", prompt))
    while request.num_computed_tokens < 48:
        engine.step()
    assert 4 <= engine.planned_saves < 12
    engine.run()
    assert engine.ask(prompt).loaded == 56


def test_blocks_stay_until_they_are_saved(start: Start) -> None:
    """A request that is over keeps its blocks while the store reads them."""
    engine = start(shares=False, blocks=40)
    prompt = prompt_of(20)
    with blocked_loop(engine.workers.ranks[0]):
        request = engine.add(Request("one", prompt))
        while request.status is not Status.FINISHED:
            engine.pass_seconds(1.0)
            engine.step()
        for _ in range(3):
            engine.step()
        assert len(request.blocks) == 6
    engine.run()
    assert not request.blocks


def test_a_save_that_nobody_ends_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has its blocks again, though the store stands still; they are not read any more."""
    monkeypatch.setattr(worker, "_LONGEST_SAVE", 0.2)
    engine = start(shares=False)
    prompt = prompt_of(37)
    request = engine.add(Request("one", prompt))
    while not request.answer:
        engine.step()
    with blocked_loop(engine.workers.ranks[0]):
        engine.run()
    assert engine.ask(prompt).answer == request.answer


def test_more_than_a_quarter_of_the_blocks_do_not_wait_to_be_saved(start: Start) -> None:
    """While the store stands still, further blocks are dropped; the engine goes on."""
    engine = start(shares=False, blocks=40)
    with blocked_loop(engine.workers.ranks[0]):
        requests = [engine.add(Request(str(number), prompt_of(20), 1)) for number in range(8)]
        for _ in range(40):
            engine.pass_seconds(1.0)
            engine.step()
        assert sum(bool(request.answer) for request in requests) >= 7
        assert len(engine.pool.free) >= 40 - 1 - 10 - 6
    engine.run()
    side = engine.workers.ranks[0].side
    assert side.figures.dropped >= 30
    assert side.opened.store.figures.offered + side.figures.dropped == engine.planned_saves


def test_of_more_blocks_than_may_wait_the_first_are_saved(start: Start) -> None:
    """A step of a small engine may fill more than a quarter of its blocks."""
    prompt = prompt_of(33)
    engine = start(shares=False, blocks=20)
    engine.ask(prompt)
    assert engine.workers.ranks[0].side.figures.dropped == 3
    assert start().ask(prompt).loaded == 20


def test_a_worker_ends_what_it_does_not_know(start: Start) -> None:
    """Where a plan was lost, the engine waits for none of its requests."""
    side = start().workers.ranks[0].side
    plan = StepPlan(
        loads=[Load("unknown", 1, (5, 6))],
        saves=[Save("unknown", (), 0, (1, 2))],
        audits=[Audit("unknown", 0, (1, 2))],
        preempted=["unknown"],
        aborted=["unknown"],
        ended={"unknown": (True, 3), "other": (False, 3)},
    )
    side.before_step(plan)
    side.begin(plan)
    side.load(plan)
    side.save(plan)
    assert side.collect(is_idle=False) == ({"unknown"}, {"unknown"})
    assert side.failed_blocks() == {5, 6}


def test_blocks_are_stored_after_those_before_them(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the copy of the first ones takes longer than that of the next."""
    prompt = prompt_of(37)
    engine = start(memory="device", shares=False, step_tokens=16)
    memory, is_second = engine.workers.ranks[0].memory, threading.Event()
    outgoing, numbers = memory.outgoing, itertools.count()

    class Slow:
        """The first copy waits for the second, for a while."""

        def __init__(self, blocks: Sequence[int]) -> None:
            self._blocks, self._number = outgoing(blocks), next(numbers)

        def ready(self) -> Sequence[Segments]:
            if self._number:
                is_second.set()
            is_second.wait(0.3)
            return self._blocks.ready()

    monkeypatch.setattr(memory, "outgoing", Slow)
    engine.ask(prompt)
    assert start().ask(prompt).loaded == 36


def test_a_preempted_requests_blocks_are_not_read_any_more(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are overwritten at once; what was not stored by then is not stored, and nothing wrong is."""
    engine = start(shares=False)
    memory, prompt = engine.workers.ranks[0].memory, prompt_of(37)
    is_reading, go_on = threading.Event(), threading.Event()
    outgoing = memory.outgoing

    class Slow:
        """Blocks that the store reads only when the preemption is over."""

        def __init__(self, blocks: Sequence[int]) -> None:
            self._blocks = outgoing(blocks)

        def ready(self) -> Sequence[Segments]:
            is_reading.set()
            go_on.wait(10)
            return self._blocks.ready()

    monkeypatch.setattr(memory, "outgoing", Slow)
    request = engine.add(Request("one", prompt, 12))
    while not is_reading.is_set():
        engine.step()
    engine.preempt()
    engine.step()
    go_on.set()
    engine.run()
    assert request.answer == answer_of(1, prompt, 12)
    assert engine.ask(prompt).answer == request.answer[:2]


def test_a_disk_that_hangs_in_a_read_holds_up_no_other_request(start: Start) -> None:
    """While a prompt is loaded from it, others are computed and saved."""
    prompt = prompt_of(37)
    start().ask(prompt)
    engine = start(shares=False)
    engine.ask(prompt_of(40))  # from now on it is known what computing takes
    with hanging(files_of(engine, prompt)[0]):
        loading = engine.add(Request("loading", prompt))
        other = engine.add(Request("other", prompt_of(20)))
        while not other.answer:
            engine.step()
        assert not loading.answer
        engine.run()
    assert loading.answer == answer_of(1, prompt, 2)
    assert start().ask(other.prompt).loaded == 16
