"""What every way to know the holders of a prompt promises."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from cache.stores.redis_store import open_redis_store
from gateway.http.background_tasks import background_tasks
from gateway.routing.prefixes.asking import Asker, Prompt
from gateway.routing.prefixes.engine_index import LOOKUP_PATH, EngineIndex
from gateway.routing.prefixes.event_sources import configured_source
from gateway.routing.prefixes.history import PrefixHistory
from gateway.routing.prefixes.kv_events import EngineBlocks
from gateway.routing.prefixes.kv_subscription import Subscription
from gateway.routing.prefixes.shared_history import SharedPrefixHistory
from gateway.routing.prefixes.views import PrefixViews, PublishedBlocks
from gateway.settings.settings import TimeoutSettings
from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.connection import ConnectionPool, open_connections
from gateway.upstreams.upstream import Upstream
from tests.cache.valkey import Valkey
from tests.gateway.routing.prefixes.engine import BLOCK_TOKENS, Engine, Publisher, stored, tokens_of
from tests.waiting import until

DEADLINE = 2.0
"""Long enough for a busy machine; the gateway's own is 20 ms."""


@dataclass
class View:
    """A view of two upstreams, a and b. `hold` makes one of them hold a prompt, `shares` asks the view."""

    hold: Callable[[str, str], Awaitable[None]]
    shares: Callable[[str], Awaitable[Mapping[str, float]]]


def blocks_of(prompt: str) -> tuple[int, ...]:
    """Numbers of the blocks of a prompt, each of all words up to its end."""
    words = prompt.split()
    return tuple(hash(tuple(words[: end + BLOCK_TOKENS])) % 2**64 for end in range(0, len(words) - 1, BLOCK_TOKENS))


def batch(event: Mapping[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, [event]])


def blocks_with(prompt: str) -> EngineBlocks:
    """Of an engine that has stored it."""
    held = EngineBlocks()
    held.apply(batch(stored(tokens_of(prompt))))
    return held


def upstream_of(engine: Engine, name: str, pool: ConnectionPool) -> Upstream:
    upstream = Upstream(engine.url, pool, TimeoutSettings(), settings=UpstreamSettings(url=engine.url, name=name))
    upstream.has.add(LOOKUP_PATH)
    return upstream


async def history_view(stack: AsyncExitStack, valkey: Valkey) -> View:
    history = PrefixHistory(100)

    async def hold(name: str, prompt: str) -> None:
        history.sent(name, blocks_of(prompt))

    async def shares(prompt: str) -> Mapping[str, float]:
        return history.shares(["a", "b"], blocks_of(prompt))

    return View(hold, shares)


async def shared_view(stack: AsyncExitStack, valkey: Valkey) -> View:
    """What one worker sends, seen by another."""
    store = await stack.enter_async_context(open_redis_store(valkey.url, 2.0))
    tasks = await stack.enter_async_context(background_tasks())
    sending, seeing = SharedPrefixHistory(100), SharedPrefixHistory(100)
    tasks.start(sending.share(store))
    tasks.start(seeing.follow(store))

    async def hold(name: str, prompt: str) -> None:
        sending.sent(name, blocks_of(prompt))
        await until(lambda: seeing.shares([name], blocks_of(prompt))[name] == 1.0)

    async def shares(prompt: str) -> Mapping[str, float]:
        return seeing.shares(["a", "b"], blocks_of(prompt))

    return View(hold, shares)


async def engines(stack: AsyncExitStack, has_index: bool) -> tuple[dict[str, Engine], list[Upstream]]:
    pool = await stack.enter_async_context(open_connections(5.0))
    servers = {name: await stack.enter_async_context(Engine(has_index).serving()) for name in "ab"}
    return servers, [upstream_of(engine, name, pool) for name, engine in servers.items()]


async def index_view(stack: AsyncExitStack, valkey: Valkey) -> View:
    servers, upstreams = await engines(stack, has_index=True)
    index = EngineIndex(Asker(DEADLINE))

    async def hold(name: str, prompt: str) -> None:
        servers[name].stored.append(tokens_of(prompt))

    return View(hold, lambda prompt: index.shares(upstreams, Prompt({"prompt": prompt})))


async def events_view(stack: AsyncExitStack, valkey: Valkey) -> View:
    _, upstreams = await engines(stack, has_index=False)
    context = stack.enter_context(zmq.asyncio.Context())
    tasks = await stack.enter_async_context(background_tasks())
    publishers = {name: await stack.enter_async_context(Publisher(context, name == "b").serving()) for name in "ab"}
    following = {name: Subscription(configured_source(publisher.address)) for name, publisher in publishers.items()}
    for name, subscription in following.items():
        tasks.start(subscription.follow())
        await publishers[name].wait_for_subscriber()

    async def hold(name: str, prompt: str) -> None:
        tokens, before = tokens_of(prompt), len(following[name].blocks)
        await publishers[name].publish(stored(tokens))
        await until(lambda: len(following[name].blocks) > before or following[name].blocks.leading(tokens) > 0)

    view = PublishedBlocks(Asker(DEADLINE), {name: subscription.blocks for name, subscription in following.items()})
    return View(hold, lambda prompt: view.shares(upstreams, Prompt({"prompt": prompt})))


@pytest.fixture(params=[history_view, shared_view, index_view, events_view], ids=lambda make: make.__name__)
async def view(request: pytest.FixtureRequest, valkey: Valkey) -> AsyncIterator[View]:
    async with AsyncExitStack() as stack:
        yield await request.param(stack, valkey)


async def test_a_view_knows_the_leading_share(view: View) -> None:
    """Of the prompt that is asked about, for each upstream that holds some of it."""
    await view.hold("a", "one two three four")
    await view.hold("b", "one two other words")
    shares = await view.shares("one two three four five six seven eight")
    assert shares == {"a": 0.5, "b": 0.25}


async def test_a_view_counts_from_the_beginning_only(view: View) -> None:
    """The same words after another beginning are nothing that could be reused."""
    await view.hold("a", "one two three four")
    await view.hold("b", "nine ten three four")
    assert await view.shares("three four one two") in ({"a": 0.0, "b": 0.0}, {})
    assert (await view.shares("nine ten three four"))["b"] == 1.0


async def test_a_view_of_nothing_says_nothing_wrong(view: View) -> None:
    """Before any prompt no upstream is said to hold any."""
    assert not any((await view.shares("one two three four")).values())


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "five six"},
        {"prompt": "one two", "cache_salt": "tenant"},
        {"prompt": "one two", "model": "adapter"},
    ],
)
async def test_the_history_counts_where_events_tell_nothing(fields: dict[str, str]) -> None:
    """None holds the prompt, or its blocks are not those of the tokens alone."""
    held = EngineBlocks()
    held.apply(batch({"type": "AllBlocksCleared"}))
    held.apply(batch(stored(tokens_of("one two three four"))))
    held.apply(batch(stored(tokens_of("seven eight"), lora_name="adapter")))
    async with AsyncExitStack() as stack:
        _, upstreams = await engines(stack, has_index=False)
        view = PublishedBlocks(Asker(DEADLINE), {"a": held})
        assert await view.shares(upstreams, Prompt({"prompt": "one two", "model": "chat"})) == {"a": 1.0}
        assert await view.shares(upstreams, Prompt(fields)) == {}


async def test_tokens_in_a_prompt_are_not_asked_for() -> None:
    """A completion's prompt may be tokens."""
    held = EngineBlocks()
    held.apply(batch(stored([1, 2, 3, 4])))
    async with AsyncExitStack() as stack:
        servers, upstreams = await engines(stack, has_index=False)
        view = PublishedBlocks(Asker(DEADLINE), {"a": held})
        assert await view.shares(upstreams, Prompt({"prompt": [1, 2, 9, 9]})) == {"a": 0.5}
        assert servers["a"].asked == 0
        assert await view.shares(upstreams, Prompt({"prompt": [1, 2, 2**70]})) == {}


async def test_what_makes_another_prompt_is_asked_with_it() -> None:
    """Variables of the chat template, and whether the answer is begun."""
    fields = {
        "model": "chat",
        "prompt": "one two",
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    async with AsyncExitStack() as stack:
        servers, upstreams = await engines(stack, has_index=True)
        await EngineIndex(Asker(DEADLINE)).shares(upstreams[:1], Prompt({**fields, "temperature": 0.5}))
        assert servers["a"].fields == fields


async def test_an_upstream_that_hangs_is_asked_once() -> None:
    """The first request waits for the deadline, the next ones do not; the other upstream's answer counts."""
    async with AsyncExitStack() as stack:
        servers, upstreams = await engines(stack, has_index=True)
        servers["a"].hang = True
        servers["b"].stored.append(tokens_of("one two"))
        index = EngineIndex(Asker(0.1))
        for _ in range(3):
            assert await index.shares(upstreams, Prompt({"prompt": "one two"})) == {"b": 1.0}
        assert servers["a"].asked == 1


async def test_a_long_prompt_has_a_longer_deadline() -> None:
    """Making tokens of it takes longer, and is still short beside computing them; a short one's stays short."""
    async with AsyncExitStack() as stack:
        servers, upstreams = await engines(stack, has_index=True)
        long = "one " + "x" * 600_000
        servers["a"].delay = 0.2
        servers["a"].stored.append(tokens_of(long))
        index = EngineIndex(Asker(0.1))
        assert await index.shares(upstreams[:1], Prompt({"prompt": long})) == {"a": 1.0}
        assert await index.shares(upstreams[:1], Prompt({"prompt": "one two"})) == {}


async def test_another_upstream_is_asked_for_tokens_while_one_is_left_alone() -> None:
    """All that publish have the same: one that hangs costs one request its view of the blocks, and no other."""
    held = blocks_with("one two")
    async with AsyncExitStack() as stack:
        servers, upstreams = await engines(stack, has_index=False)
        servers["a"].hang = True
        view = PublishedBlocks(Asker(1.0), {"a": held, "b": held})
        shares = [await view.shares(upstreams, Prompt({"prompt": "one two"})) for _ in range(3)]
        assert shares == [{}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}]
        assert servers["a"].asked == 1


async def test_an_upstream_without_the_endpoint_is_left_alone() -> None:
    """The next request asks another one."""
    held = blocks_with("one two")
    async with AsyncExitStack() as stack:
        servers, upstreams = await engines(stack, has_index=False)
        servers["a"].is_closed = True
        view = PublishedBlocks(Asker(DEADLINE), {"a": held, "b": held})
        shares = [await view.shares(upstreams, Prompt({"prompt": "one two"})) for _ in range(2)]
        assert shares == [{}, {"a": 1.0, "b": 1.0}]


async def test_the_least_busy_upstream_is_asked_for_tokens() -> None:
    """It answers first."""
    held = blocks_with("one two")
    async with AsyncExitStack() as stack:
        servers, upstreams = await engines(stack, has_index=False)
        upstreams[0].in_flight = 3
        await PublishedBlocks(Asker(DEADLINE), {"a": held, "b": held}).shares(upstreams, Prompt({"prompt": "one two"}))
        assert (servers["a"].asked, servers["b"].asked) == (0, 1)


async def test_only_upstreams_that_may_know_are_asked() -> None:
    """Where none has an index or publishes events, no question is sent."""
    async with AsyncExitStack() as stack:
        servers, upstreams = await engines(stack, has_index=False)
        for upstream in upstreams:
            upstream.has.clear()
        assert await PrefixViews({}).held(upstreams, Prompt({"prompt": "one two"})) == {}
        assert servers["a"].asked == 0


async def test_a_new_worker_begins_with_what_others_have_sent(valkey: Valkey) -> None:
    """It reads the stream from its oldest entry on."""
    async with open_redis_store(valkey.url, 2.0) as store, background_tasks() as tasks:
        first, late = SharedPrefixHistory(100), SharedPrefixHistory(100)
        tasks.start(first.share(store))
        first.sent("a", (1, 2, 2**64 - 1))
        await until_shared(valkey)
        tasks.start(late.follow(store))
        await until(lambda: late.shares(["a"], (1, 2, 2**64 - 1)) == {"a": 1.0})


async def until_shared(valkey: Valkey) -> None:
    import redis.asyncio

    client = redis.asyncio.Redis.from_url(valkey.url)

    async def has_entry() -> bool:
        return bool(await client.xlen("keepgate:routed"))

    await until(has_entry)
    await client.aclose()


async def test_a_killed_redis_leaves_each_worker_its_own_view(own_valkey: Valkey) -> None:
    """Nothing waits for it, and once it is back what is sent is shared again."""
    async with open_redis_store(own_valkey.url, 0.1) as store, background_tasks() as tasks:
        one, other = SharedPrefixHistory(100), SharedPrefixHistory(100)
        for history in (one, other):
            tasks.start(history.share(store))
            tasks.start(history.follow(store))
        await own_valkey.kill()
        one.sent("a", (1, 2))
        assert one.shares(["a"], (1, 2)) == {"a": 1.0}
        await own_valkey.start()

        def is_shared() -> bool:
            one.sent("b", (7,))
            return other.shares(["b"], (7,)) == {"b": 1.0}

        await until(is_shared, within=15)


async def test_what_stands_in_the_stream_from_elsewhere_is_ignored(valkey: Valkey) -> None:
    """An entry of another version, or of a stranger, ends nothing."""
    async with open_redis_store(valkey.url, 2.0) as store, background_tasks() as tasks:
        await store.command(("XADD", "keepgate:routed", "*", "worker", "x", "sent", b"\xc1"))
        await store.command(("XADD", "keepgate:routed", "*", "other", "x"))
        one, other = SharedPrefixHistory(100), SharedPrefixHistory(100)
        tasks.start(one.share(store))
        tasks.start(other.follow(store))
        one.sent("a", (1,))
        await until(lambda: other.shares(["a"], (1,)) == {"a": 1.0})


class Recorded:
    """Keeps commands instead of a server, to count what is sent."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str | bytes | int]] = []
        self.done = asyncio.Event()

    async def command(self, command: tuple[str | bytes | int, ...], deadline: float | None = None) -> None:
        self.commands.append(command)
        self.done.set()


async def test_a_busy_worker_gathers_what_it_sends() -> None:
    """A hundred prompts are one entry."""
    recorded, history = Recorded(), SharedPrefixHistory(1000)
    async with background_tasks() as tasks:
        tasks.start(history.share(recorded))
        for number in range(100):
            history.sent("a", (number,))
        async with asyncio.timeout(5):
            await recorded.done.wait()
    assert len(recorded.commands) == 1
