"""Blocks of another process: an index and peers that stand still or lie cost time, and no wrong number."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from aiohttp import web

from prefix_store.connectors.http_api import serving
from prefix_store.connectors.options import Listening
from prefix_store.store.config import StoreConfig
from prefix_store.store.open_store import OpenStore
from tests.cache.valkey import Valkey
from tests.compose.monitoring import free_port
from tests.prefix_store.connectors.paged_engine.engine import PagedEngine, Setup, paged_engine
from tests.prefix_store.connectors.paged_engine.faults import wait_until
from tests.prefix_store.connectors.paged_engine.prompts import prompt_of
from tests.prefix_store.peers.world import SECRET

Frame = Callable[[bytes, bytes], Awaitable[bytes | None]]
Start = Callable[[str], PagedEngine]


@pytest.fixture
def start(own_valkey: Valkey) -> Iterator[Start]:
    """Engines with blocks in memory that find each other: ``start(name)``."""
    with ExitStack() as stack:

        def start(name: str) -> PagedEngine:
            at = Listening("127.0.0.1", free_port())
            address = f"http://{at.host}:{at.port}"
            config = StoreConfig(memory_bytes=2**20, index=own_valkey.url, name=name, address=address, secret=SECRET)
            engine = stack.enter_context(paged_engine(Setup(config)))
            end = asyncio.Event()
            thread = engine.workers.ranks[0].thread
            thread.begin(_serve(thread.value, at, end))
            stack.callback(lambda: _in_loop(engine, _set(end)))
            _in_loop(engine, _index(engine).next_heartbeat())
            return engine

        yield start


def _opened(engine: PagedEngine) -> OpenStore:
    return engine.workers.ranks[0].thread.value


def _index(engine: PagedEngine) -> Any:
    return _opened(engine).index


async def _serve(opened: OpenStore, at: Listening, end: asyncio.Event) -> None:
    assert opened.server is not None
    application = web.Application()
    application.add_routes(opened.server.routes())
    async with serving(application, at):
        await end.wait()


async def _set(event: asyncio.Event) -> None:
    event.set()


def _in_loop(engine: PagedEngine, work: Coroutine[Any, Any, None]) -> None:
    """Waits for work in the loop of the engine's store."""
    done: list[None] = []

    async def run() -> None:
        await work
        done.append(None)

    engine.workers.ranks[0].thread.begin(run())
    wait_until(lambda: bool(done))


def _compute_and_publish(engine: PagedEngine, prompt: list[int]) -> None:
    """Computes and stores a prompt, and publishes that."""
    engine.ask(prompt)
    _in_loop(engine, _index(engine).flush())


def _lie(engine: PagedEngine, lie: Callable[[Frame], Frame]) -> None:
    memory: Any = _opened(engine).store.tiers["memory"]
    memory.frame = lie(memory.frame)


def _flipped(frame: Frame) -> Frame:
    async def give(key: bytes, parent: bytes) -> bytes | None:
        given = bytearray(await frame(key, parent) or b"")
        given[-1] ^= 1
        return bytes(given)

    return give


def _of_another_block(frame: Frame) -> Frame:
    first: list[bytes] = []

    async def give(key: bytes, parent: bytes) -> bytes | None:
        first.append(await frame(key, parent) or b"")
        return first[0]

    return give


def _cut(frame: Frame) -> Frame:
    async def give(key: bytes, parent: bytes) -> bytes | None:
        return (await frame(key, parent) or b"")[:-1]

    return give


def _never(frame: Frame) -> Frame:
    async def give(key: bytes, parent: bytes) -> bytes | None:
        await asyncio.Event().wait()
        return None

    return give


def test_a_prompt_is_loaded_from_another_process(start: Start) -> None:
    """All its blocks but that of the last token."""
    one, other, prompt = start("one"), start("other"), prompt_of(37)
    _index(other)._deadline = 5.0  # a busy machine may need longer than 20 ms
    _compute_and_publish(one, prompt)
    assert other.ask(prompt).loaded == 36
    assert other.workers.ranks[0].side.figures.failed_loads == 0


@pytest.mark.parametrize(
    ("lie", "right"),
    [
        pytest.param(_flipped, 0, id="flipped"),
        pytest.param(_of_another_block, 1, id="of another block"),
        pytest.param(_cut, 0, id="cut"),
        pytest.param(_never, 0, id="never"),
    ],
)
def test_what_a_peer_gives_wrongly_or_not_at_all_is_computed(
    start: Start, lie: Callable[[Frame], Frame], right: int
) -> None:
    """Every number that is read is the right one."""
    one, other, prompt = start("one"), start("other"), prompt_of(37)
    _index(other)._deadline = 5.0  # a busy machine may need longer than 20 ms
    _compute_and_publish(one, prompt)
    _lie(one, lie)
    assert other.ask(prompt).loaded == 36
    assert other.workers.ranks[0].side.figures.failed_loads == 9 - right
    again = other.ask(prompt)  # what was computed is its own now
    assert (again.shared, again.loaded) == (36, 0)


@pytest.mark.parametrize("trouble", ["frozen", "killed"])
async def test_an_index_that_is_away_costs_a_lookup_and_no_answer(
    start: Start, own_valkey: Valkey, trouble: str
) -> None:
    """Blocks of others are computed, own ones loaded; what comes back is used again."""
    one, other = start("one"), start("other")
    theirs, mine = prompt_of(37), prompt_of(37)
    _compute_and_publish(one, theirs)
    _compute_and_publish(other, mine)
    other.reset(forgets=False)
    if trouble == "frozen":
        own_valkey.freeze()
    else:
        await own_valkey.kill()
    try:
        began = time.monotonic()
        assert other.ask(theirs).loaded == 0
        assert other.ask(mine).loaded == 36
        assert time.monotonic() - began < 5.0
    finally:
        if trouble == "frozen":
            own_valkey.thaw()
    if trouble == "frozen":

        def is_back() -> bool:
            later = prompt_of(37)
            _compute_and_publish(one, later)
            return other.ask(later).loaded == 36

        wait_until(is_back)
