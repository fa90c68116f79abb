"""What is loaded: the right numbers, in time, and computed where that does not work."""

import threading
from typing import Any

import pytest

from prefix_store.connectors import worker
from prefix_store.connectors.scheduler import SchedulerSide
from prefix_store.connectors.transfers import Found, StepReport
from prefix_store.identity.tenants import Tenants
from tests.prefix_store.connectors.conftest import Start
from tests.prefix_store.connectors.paged_engine.engine import PagedEngine, Request, Status
from tests.prefix_store.connectors.paged_engine.faults import blocked_loop, files_of, flip, hanging, wait_until
from tests.prefix_store.connectors.paged_engine.prompts import prompt_of
from tests.prefix_store.connectors.paged_engine.toy_model import BLOCK, answer_of


@pytest.mark.parametrize("memory", ["one", "layers", "device"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_is_loaded_after_a_restart(start: Start, memory: str, depth: int, ranks: int) -> None:
    """All its blocks but that of the last token come from the disk, in every kind of memory."""
    setup: dict[str, Any] = {"memory": memory, "depth": depth, "ranks": ranks}
    prompt = prompt_of(37)
    first = start(**setup)
    assert first.ask(prompt).loaded == 0
    first.close()
    assert start(**setup).ask(prompt).loaded == 36


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_token_is_left_to_compute(start: Start, shares: bool, over: int) -> None:
    """Of a prompt that is stored to its end, the block with the last token is computed: its logits are wanted."""
    prompt = prompt_of(40)
    start().ask(prompt + prompt_of(8))
    request = start(shares=shares).ask(prompt[: 20 + over])
    assert request.loaded == (16 if over <= 0 else 20)
    assert len(request.answer) == request.max_tokens


def test_the_engines_own_blocks_are_not_loaded_again(start: Start) -> None:
    """The load begins after what its prefix cache has."""
    prompt = prompt_of(40)
    start().ask(prompt)
    engine = start()
    engine.ask(prompt[:17])
    request = engine.ask(prompt)
    assert (request.shared, request.loaded) == (16, 20)


def test_two_requests_with_one_prefix_load_it_at_once(start: Start) -> None:
    """Each into blocks of its own: what is being loaded is not shared."""
    prompt = prompt_of(40)
    start().ask(prompt)
    engine = start(shares=False)
    requests = [engine.add(Request(name, prompt)) for name in ("one", "other")]
    engine.run()
    assert [request.loaded for request in requests] == [36, 36]
    assert requests[0].answer == requests[1].answer == answer_of(1, prompt, 2)


@pytest.mark.parametrize("place", [0, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_that_fails_is_computed_from_there_on(start: Start, place: int, ranks: int) -> None:
    """A damaged block and those after it are computed, in every worker, and stored again for the next request."""
    prompt = prompt_of(37)
    start(ranks=ranks).ask(prompt)
    engine = start(ranks=ranks, shares=False)
    flip(files_of(engine, prompt, rank=ranks - 1)[place])
    assert engine.ask(prompt).loaded == 36
    side = engine.workers.ranks[-1].side
    assert side.figures.failed_loads == 9 - place
    assert engine.planned_saves == (9 - place) * ranks

    def is_whole() -> bool:
        failed = side.figures.failed_loads
        return engine.ask(prompt).loaded == 36 and side.figures.failed_loads == failed

    wait_until(is_whole)  # the disk removes what came after the damaged block, perhaps only after it was stored again


def test_a_block_counts_only_where_every_worker_has_its_part(start: Start) -> None:
    """Where one worker's part of a block is gone, the request is loaded up to there."""
    prompt = prompt_of(37)
    start(ranks=2).ask(prompt)
    engine = start(ranks=2)
    for file in files_of(engine, prompt, rank=1)[5:]:
        file.unlink()
    assert engine.ask(prompt).loaded == 20
    assert [rank.side.figures.failed_loads for rank in engine.workers.ranks] == [0, 0]
    engine.close()
    assert start(ranks=2).ask(prompt).loaded == 36  # what was gone is stored again


def test_the_answers_of_all_workers_are_waited_for(start: Start) -> None:
    """Also where they come in other steps."""
    prompt = prompt_of(37)
    start(ranks=2).ask(prompt)
    engine = start(ranks=2)
    for file in files_of(engine, prompt, rank=1)[5:]:
        file.unlink()
    with blocked_loop(engine.workers.ranks[1]):
        request = engine.add(Request("one", prompt))
        for _ in range(30):
            engine.step()
        assert request.status is Status.WAITING
    engine.run()
    assert request.loaded == 20


def test_a_disk_that_hangs_delays_a_request_and_no_more(start: Start) -> None:
    """The load ends at its deadline, and the prompt is computed."""
    prompt = prompt_of(37)
    start().ask(prompt)
    engine = start()
    engine.ask(prompt_of(40))  # from now on it is known what computing takes
    with hanging(files_of(engine, prompt)[3]):
        assert engine.ask(prompt).loaded == 36
    assert engine.workers.ranks[0].side.figures.failed_loads == 6


def test_an_answer_that_comes_late_is_not_waited_for(start: Start) -> None:
    """After two seconds without an answer to its look-up a prompt is computed; the answer is ignored."""
    prompt = prompt_of(37)
    start().ask(prompt)
    engine = start(shares=False)
    with blocked_loop(engine.workers.ranks[0]):
        request = engine.add(Request("late", prompt))
        for _ in range(3):
            engine.step()
        assert request.status is Status.WAITING
        engine.pass_seconds(2.1)
        for _ in range(3):
            engine.step()
        assert request.status is not Status.WAITING
    engine.run()
    assert (request.loaded, engine.side.late) == (0, 1)
    assert request.answer == answer_of(1, prompt, 2)
    assert engine.ask(prompt).loaded == 36


@pytest.mark.parametrize("memory", ["one", "device"])
def test_a_load_that_nobody_ends_is_given_up(start: Start, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is computed, and the blocks are free: nothing is written when the store's loop goes on."""
    monkeypatch.setattr(worker, "_LONGEST_LOAD", 0.2)
    prompt = prompt_of(37)
    start().ask(prompt)
    engine = start(memory=memory, shares=False)
    request = _loading(engine, prompt)
    with blocked_loop(engine.workers.ranks[0]):
        while not request.answer:
            engine.step()
    engine.run()
    assert request.answer == answer_of(1, prompt, 2)
    assert engine.ask(prompt).answer == request.answer


@pytest.mark.parametrize("how", ["kill", "abort", "give up"])
def test_blocks_that_are_copied_to_a_device_are_not_freed_meanwhile(
    start: Start, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """However a load ends, the copy from the host has ended before."""
    prompt = prompt_of(37)
    start().ask(prompt)
    engine = start(memory="device", shares=False)
    memory = engine.workers.ranks[0].memory
    put, is_copying, go_on = memory.put, threading.Event(), threading.Event()  # type: ignore[attr-defined]

    def slow_put(*arguments: Any) -> None:
        is_copying.set()
        go_on.wait(0.5)
        put(*arguments)

    monkeypatch.setattr(memory, "put", slow_put)
    request = _loading(engine, prompt)
    assert is_copying.wait(10)
    if how == "kill":
        engine.workers.ranks[0].kill_thread()
    elif how == "abort":
        engine.abort(request.request_id)
    else:
        monkeypatch.setattr(worker, "_LONGEST_LOAD", 0.0)
    engine.run()


def _loading(engine: PagedEngine, prompt: list[int]) -> Request:
    """A request whose load has begun."""
    request = engine.add(Request("loading", prompt))
    while request.status is Status.WAITING:
        engine.step()
    assert request.status is Status.LOADING
    return request


def test_a_request_is_aborted_while_it_is_loaded(start: Start) -> None:
    """Its blocks are freed when the load has ended, which the abort ends."""
    prompt = prompt_of(37)
    start().ask(prompt)
    engine = start()
    with hanging(files_of(engine, prompt)[3]):
        request = _loading(engine, prompt)
        engine.abort(request.request_id)
        assert request.blocks
        engine.run(seconds=3.0)
        assert not request.blocks


def test_a_consumer_saves_nothing_and_a_producer_loads_nothing(start: Start) -> None:
    """As kv_role says."""
    prompt = prompt_of(37)
    producer = start(saves=True, loads=False, shares=False, step_tokens=64)
    # Prefill alone, in one step, as a producer's requests are: it is over before the look-up is answered.
    assert [producer.ask(prompt, max_tokens=1).loaded for _ in range(2)] == [0, 0]
    consumer = start(saves=False, loads=True)
    assert consumer.ask(prompt).loaded == 36
    other = prompt_of(37)
    consumer.ask(other)
    assert consumer.planned_saves == 0
    assert start().ask(other).loaded == 0


def test_what_is_stored_is_not_found_after_a_reset(start: Start) -> None:
    """After reset_cache, which follows new weights, nothing older is loaded; nor is what is newer after a restart."""
    stored, waiting, new = prompt_of(37), prompt_of(37), prompt_of(37)
    engine = start(shares=False, most_running=1)
    for prompt in (stored, waiting):
        engine.ask(prompt)
    running = engine.add(Request("running", prompt_of(20), 12))
    request = engine.add(Request("waiting", waiting))
    while len(running.answer) < 6:  # the other's look-up has been answered by then
        engine.step()
    engine.reset()
    engine.run()
    assert request.loaded == 0
    assert engine.ask(stored).loaded == 0
    assert [engine.ask(new).loaded for _ in range(2)] == [0, 36]
    engine.close()
    assert start().ask(new).loaded == 0


def test_a_request_that_waits_at_a_reset_is_stored_for_the_new_weights(start: Start) -> None:
    """Not for those that it arrived at, which a restarted engine may have again."""
    prompt = prompt_of(37)
    engine = start(shares=False, most_running=1)
    running = engine.add(Request("running", prompt_of(20), 12))
    engine.add(Request("waiting", prompt))
    while len(running.answer) < 6:
        engine.step()
    engine.reset()
    engine.run()
    assert engine.ask(prompt).loaded == 36
    engine.close()
    assert start().ask(prompt).loaded == 0


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_that_runs_at_a_reset_is_not_saved_any_more(start: Start, is_preempted: bool) -> None:
    """Its blocks are of the old weights, and so is what follows from them, unless all is computed again."""
    engine = start(shares=False)
    request = engine.add(Request("running", prompt_of(21), 12))
    while len(request.answer) < 3:
        engine.step()
    assert engine.planned_saves == 5
    engine.reset()
    if is_preempted:
        engine.step()
        engine.preempt()
    engine.run()
    assert len(request.answer) == 12
    assert (engine.planned_saves > 5) == is_preempted


def test_a_preempted_request_is_loaded_again(start: Start) -> None:
    """Its blocks were overwritten; the store has what was saved."""
    engine = start(shares=False)
    request = engine.add(Request("one", prompt_of(33), 12))
    while not request.answer:
        engine.step()
    wait_until(lambda: engine.workers.ranks[0].side.opened.store.tiers["disk"].counts.writes >= 8)
    engine.preempt()
    engine.run()
    assert request.preemptions == 1
    assert request.loaded >= 32
    assert request.answer == answer_of(1, request.prompt, 12)


def test_an_answer_from_before_a_preemption_is_void() -> None:
    """With two steps under way it arrives after the next question has been asked."""
    scheduler = SchedulerSide(BLOCK, Tenants(BLOCK))
    request = Request("one", prompt_of(4 * BLOCK + 1))
    scheduler.arrived(request)
    (first,) = scheduler.build_plan({}, (), lambda request_id: ()).lookups
    (second,) = scheduler.build_plan({}, ("one",), lambda request_id: ()).lookups
    scheduler.step_ended(StepReport({"one": Found(first.number, until=4, kept=4)}, step=1), ())
    assert scheduler.matched_tokens(request, 0) is None
    scheduler.step_ended(StepReport({"one": Found(second.number, until=2, kept=2)}, step=2), ())
    assert scheduler.matched_tokens(request, 0) == 2 * BLOCK


def test_a_late_answer_of_one_rank_does_not_count_for_the_next_question() -> None:
    """What another rank has answered to the later one stays."""
    assert Found(1, until=9, kept=9).and_of(Found(2, until=3, kept=2)) == Found(2, until=3, kept=2)
    assert Found(2, until=5, kept=1).and_of(Found(2, until=3, kept=2)) == Found(2, until=3, kept=1, workers=2)
