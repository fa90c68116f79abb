"""Where upstreams publish KV cache events, and what is known of them together."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import zmq.asyncio

from gateway.http.background_tasks import background_tasks
from gateway.routing.prefixes.event_follower import EventFollower
from gateway.routing.prefixes.event_sources import EventSource, listed_sources
from gateway.settings.settings import TimeoutSettings
from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.connection import open_connections
from gateway.upstreams.upstream import Upstream
from tests.gateway.routing.prefixes.engine import Engine, Publisher, stored
from tests.waiting import until


class World:
    """An engine with two publishers, the ranks of a data-parallel one, and a follower of it."""

    def __init__(self, engine: Engine, ranks: list[Publisher], upstream: Upstream, follower: EventFollower) -> None:
        self.engine = engine
        self.ranks = ranks
        self.upstream = upstream
        self.follower = follower

    def publish_at(self, *ranks: Publisher) -> None:
        """What the engine lists from now on, as vLLM 0.32 does."""
        self.engine.sources = {str(number): listed(rank.address) for number, rank in enumerate(ranks)}


def listed(address: str) -> dict[str, Any]:
    port = int(address.rpartition(":")[2])
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + 1}",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "",
    }


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(has_index=False).serving())
        pool = await stack.enter_async_context(open_connections(5.0))
        context = stack.enter_context(zmq.asyncio.Context())
        ranks = [await stack.enter_async_context(Publisher(context, as_maps=True).serving()) for _ in range(2)]
        settings = UpstreamSettings(url=engine.url, name="a", kv_events="auto")
        upstream = Upstream(engine.url, pool, TimeoutSettings(), settings=settings)
        tasks = await stack.enter_async_context(background_tasks())
        yield World(engine, ranks, upstream, EventFollower(tasks))


async def test_all_ranks_of_an_upstream_are_followed(world: World) -> None:
    """Where vLLM lists them. A prompt is held by as much as a rank has of it on average, for it may get to any."""
    world.publish_at(*world.ranks)
    world.follower.follow([world.upstream])
    blocks = world.follower.blocks["a"]
    await world.ranks[0].publish(stored([1, 2, 3, 4]))
    await until(lambda: blocks.is_whole and blocks.leading([1, 2, 3, 4]) == 2)
    await world.ranks[1].publish(stored([1, 2, 3, 4]))
    await until(lambda: blocks.leading([1, 2, 3, 4]) == 4)
    assert len(blocks) == 4


async def test_an_upstream_that_publishes_elsewhere_is_followed_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart at ports that the system has chosen; what was known of the former ones is forgotten."""
    monkeypatch.setattr("gateway.routing.prefixes.event_follower._RECHECK", 0.01)
    first, second = world.ranks
    world.publish_at(first)
    await first.publish(stored([1, 2]))
    await second.publish(stored([3, 4]))
    world.follower.follow([world.upstream])
    blocks = world.follower.blocks["a"]
    await until(lambda: blocks.leading([1, 2]) == 2)
    world.publish_at(second)
    await until(lambda: blocks.leading([3, 4]) == 2)
    assert blocks.leading([1, 2]) == 0
    world.follower.follow([])
    assert world.follower.blocks == {}


async def test_an_upstream_without_publishers_is_told_of(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and it is asked again: nothing is known, and nothing is wrong."""
    monkeypatch.setattr("gateway.routing.prefixes.event_follower._RETRY", 0.01)
    world.follower.follow([world.upstream])
    await until(lambda: "lists no publisher of KV cache events" in caplog.text)
    blocks = world.follower.blocks["a"]
    assert (len(blocks), blocks.is_whole, blocks.leading([1, 2])) == (0, False, 0)
    await world.ranks[0].publish(stored([1, 2]))
    world.publish_at(world.ranks[0])
    await until(lambda: blocks.leading([1, 2]) == 2)
    assert caplog.text.count("lists no publisher") == 1


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, {EventSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")}),
        ({"replay_endpoint": None}, {EventSource("tcp://127.0.0.1:5557", None)}),
        ({"endpoint": "tcp://10.0.0.7:40001"}, {EventSource("tcp://10.0.0.7:40001", "tcp://127.0.0.1:5558")}),
        ({"endpoint": "tcp://[::]:5557"}, {EventSource("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")}),
        ({"endpoint": "ipc:///tmp/events"}, set()),
        ({"endpoint": 5557}, set()),
        ({"publisher": "null"}, set()),
    ],
)
async def test_addresses_are_those_of_the_upstream(
    world: World, fields: dict[str, Any], found: set[EventSource]
) -> None:
    """A publisher that listens on all addresses is at the upstream's own; what is no address of TCP is left out."""
    world.engine.sources = {"0": listed("tcp://127.0.0.1:5557") | fields}
    assert await listed_sources(world.upstream) == frozenset(found)
