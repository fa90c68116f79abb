"""Look-ups ahead of the steps: sooner, and never anything but what the steps would have said."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from prefix_store.connectors import lookup_sockets, scheduler
from prefix_store.connectors.lookup_sockets import LookupClient, connect
from prefix_store.connectors.transfers import NO_NAMESPACE, Found, Lookup
from prefix_store.frames.block_id import BlockId
from tests.prefix_store.connectors.conftest import Start
from tests.prefix_store.connectors.paged_engine.engine import PagedEngine, Request, Status
from tests.prefix_store.connectors.paged_engine.faults import blocked_loop, wait_until
from tests.prefix_store.connectors.paged_engine.prompts import prompt_of
from tests.prefix_store.connectors.paged_engine.toy_model import answer_of

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="sockets of Linux")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than a step waits."""
    monkeypatch.setattr(scheduler, "_AHEAD_SECONDS", 5.0)


@pytest.fixture
def client() -> Iterator[LookupClient]:
    """Of two workers, none of which has connected."""
    client = LookupClient(2)
    yield client
    client.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_stored_prompt_is_loaded_with_the_next_step(start: Start, ranks: int, depth: int) -> None:
    """The step after its arrival begins the load; without the sockets it begins the look-up."""
    prompt = prompt_of(37)
    start(ranks=ranks).ask(prompt)
    engine = _connected(start, ranks=ranks, depth=depth, shares=False)
    request = engine.add(Request("one", prompt))
    engine.step()
    assert request.status is Status.LOADING
    engine.run()
    assert (request.loaded, request.answer) == (36, answer_of(1, prompt, 2))
    slow = start(ranks=ranks, depth=depth, shares=False)
    other = slow.add(Request("other", prompt))
    slow.step()
    assert other.status is Status.WAITING
    slow.run()
    assert other.loaded == 36


def test_an_unknown_prompt_is_computed_with_the_next_step(start: Start) -> None:
    """A prompt that is not stored loses no step."""
    engine = _connected(start)
    request = engine.add(Request("one", prompt_of(37)))
    engine.step()
    assert request.status is Status.RUNNING
    engine.run()
    assert request.answer == answer_of(1, request.prompt, 2)


def test_a_worker_that_does_not_answer_in_time_is_not_waited_for_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step waits; the next ones do not until an answer has come, and the answers of the steps count."""
    monkeypatch.setattr(scheduler, "_AHEAD_SECONDS", 0.2)
    prompt = prompt_of(37)
    start().ask(prompt)
    engine = _connected(start, shares=False)
    with blocked_loop(engine.workers.ranks[0]):
        requests, took = [], []
        for number in range(6):
            requests.append(engine.add(Request(str(number), prompt)))
            began = time.monotonic()
            engine.step()
            took.append(time.monotonic() - began)
    assert took[0] >= 0.2
    assert sum(seconds >= 0.2 for seconds in took[1:]) <= 1  # a busy machine's
    engine.run()
    assert [request.loaded for request in requests] == [36] * 6


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_whose_store_has_ended_is_asked_no_more(start: Start, rank: int) -> None:
    """Its connection ends with its store, and prompts are computed."""
    prompt = prompt_of(37)
    start(ranks=2).ask(prompt)
    engine = _connected(start, ranks=2, shares=False)
    worker = engine.workers.ranks[rank]
    worker.kill_thread()
    wait_until(lambda: not worker.thread.is_alive)
    request = engine.ask(prompt)
    assert request.loaded == 0
    began = time.monotonic()
    assert engine.ask(prompt).loaded == 0
    assert time.monotonic() - began < 5.0


def test_one_of_two_workers_answers_ahead(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer alone counts nothing, and is not counted twice when the steps bring it again."""
    monkeypatch.setattr(scheduler, "_AHEAD_SECONDS", 0.05)
    prompt = prompt_of(37)
    start(ranks=2).ask(prompt)
    engine = _connected(start, ranks=2, shares=False)
    with blocked_loop(engine.workers.ranks[1]):
        request = engine.add(Request("one", prompt))
        for _ in range(20):
            engine.step()
        assert request.status is Status.WAITING
    engine.run()
    assert (request.loaded, request.answer) == (36, answer_of(1, prompt, 2))


@pytest.mark.parametrize("is_sent", [False, True])
def test_blocks_of_other_weights_are_not_found_ahead(start: Start, is_sent: bool) -> None:
    """A request that comes while the workers learn of new weights is not answered by the old names."""
    prompt = prompt_of(37)
    engine = _connected(start, shares=False, depth=2)
    engine.ask(prompt)
    engine.reset()
    if is_sent:
        engine.add(Request("first", prompt_of(9)))
        engine.step()
    request = engine.add(Request("second", prompt))
    engine.run()
    assert request.loaded == 0
    assert request.answer == answer_of(1, prompt, 2)


def test_an_aborted_request_is_forgotten(start: Start) -> None:
    """Also where it is over before its step: workers keep nothing of it."""
    engine = _connected(start)
    for number in range(5):
        engine.add(Request(str(number), prompt_of(37)))
        engine.abort(str(number))
    engine.run()
    side = engine.workers.ranks[0].side

    def is_forgotten() -> bool:
        engine.ask(prompt_of(9))
        return not side._ahead and not side._requests  # what no figure shows

    wait_until(is_forgotten)


def test_a_long_prompt_goes_with_its_step(client: LookupClient) -> None:
    """What is larger than a message is asked nobody ahead."""
    workers = _connect_all(client)
    block = BlockId(NO_NAMESPACE, bytes(16), bytes(16), bytes(16))
    assert client.ask(Lookup("short", 1, (block,)))
    assert not client.ask(Lookup("long", 2, (block,) * 20_000))
    for worker in workers:
        worker.close()


def test_nobody_is_asked_before_all_have_connected(client: LookupClient) -> None:
    """Until then the address is said with each step."""
    lookup = Lookup("one", 1, ())
    assert not client.ask(lookup)
    first = connect(client.address)
    assert not client.ask(lookup)
    assert client.address
    second = connect(client.address)
    assert client.ask(lookup)
    assert not client.address
    assert first is not None
    assert second is not None
    first.close()
    list(client.answers(1.0))
    assert not client.ask(lookup)
    second.close()


def test_a_worker_of_another_host_has_no_connection() -> None:
    """An address that is nobody's here."""
    assert connect(b"\0nobody") is None


def test_another_user_is_not_answered(client: LookupClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of these sockets have no permissions, so both sides look who the other one is."""
    address = client.address
    stranger = connect(address)
    assert stranger is not None
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: 12_345)
        assert connect(address) is None
        assert not client.ask(Lookup("one", 1, ()))
    assert stranger.recv(10) == b""
    stranger.close()


def test_answers_of_single_workers_come_as_they_are(client: LookupClient) -> None:
    """With the request they are for."""
    workers = _connect_all(client)
    lookup = Lookup("one", 7, (BlockId(NO_NAMESPACE, b"k" * 16, b"p" * 16, b"t" * 16),))
    assert client.ask(lookup)
    thread = threading.Thread(target=_answer, args=(workers[0], lookup))
    thread.start()
    assert list(client.answers(20.0)) == [("one", Found(7, 1, 1))]
    thread.join()
    for worker in workers:
        worker.close()


def _answer(worker: socket.socket, lookup: Lookup) -> None:
    async def answer() -> None:
        asked: asyncio.Queue[Lookup] = asyncio.Queue()
        reading = asyncio.create_task(lookup_sockets.receive(worker, lambda one, _: asked.put_nowait(one)))
        assert await asked.get() == lookup
        await lookup_sockets.send(worker, "one", Found(7, 1, 1))
        reading.cancel()

    asyncio.run(answer())


def _connect_all(client: LookupClient) -> list[socket.socket]:
    found = [connect(client.address) for _ in range(2)]
    workers = [worker for worker in found if worker is not None]
    assert len(workers) == 2
    client.ask(Lookup("to accept them", 0, ()))
    for worker in workers:
        worker.recv(2**18)
    return workers


def _connected(start: Start, **setup: object) -> PagedEngine:
    """An engine whose workers have connected: a first request has been through."""
    engine = start(asks_ahead=True, **setup)
    engine.ask(prompt_of(3))
    return engine
