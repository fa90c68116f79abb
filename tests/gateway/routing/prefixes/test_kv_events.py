"""KV cache events."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http.background_tasks import background_tasks
from gateway.routing.prefixes.event_sources import EventSource, configured_source
from gateway.routing.prefixes.kv_events import BadEvents, EngineBlocks
from gateway.routing.prefixes.kv_subscription import Subscription
from tests.gateway.routing.prefixes.engine import BLOCK_TOKENS, Publisher, engine_hash, removed, stored
from tests.waiting import until

TOKENS = [11, 12, 13, 14, 15, 16]
CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: dict[str, Any], as_maps: bool = False) -> bytes:
    if as_maps:
        return msgspec.msgpack.encode({"ts": 1.0, "events": events})
    return msgspec.msgpack.encode([1.0, [list(event.values()) for event in events]])


@pytest.mark.parametrize("as_maps", [False, True])
def test_blocks_are_stored_and_removed(as_maps: bool) -> None:
    """In both forms that engines send."""
    blocks = EngineBlocks()
    blocks.apply(batch(stored(TOKENS), as_maps=as_maps))
    assert blocks.leading([*TOKENS, 17, 18]) == 6
    assert blocks.leading([*TOKENS[:4], 99, 99]) == 4
    blocks.apply(batch(removed(TOKENS[:4], TOKENS), as_maps=as_maps))
    assert blocks.leading(TOKENS) == 2
    blocks.apply(batch(CLEARED, as_maps=as_maps))
    assert (blocks.leading(TOKENS), len(blocks)) == (0, 0)


def test_a_block_follows_its_parent() -> None:
    """Later blocks are told with their parent's hash; one whose parent is unknown is left out."""
    blocks = EngineBlocks()
    later = stored([13, 14]) | {"block_hashes": [engine_hash(TOKENS[:4])], "parent_block_hash": engine_hash([11, 12])}
    blocks.apply(batch(later))
    assert len(blocks) == 0
    blocks.apply(batch(stored([11, 12]), later))
    assert blocks.leading(TOKENS) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_id": 1},
        {"lora_id": None, "medium": None, "lora_name": "law"},
        {"lora_id": None, "medium": None, "lora_name": None, "extra_keys": [["salt", ["image", 0]], None, None]},
        {"lora_id": None, "medium": None, "lora_name": None, "extra_keys": None, "group_idx": 1},
    ],
)
def test_blocks_of_more_than_tokens_are_left_out(fields: dict[str, Any]) -> None:
    """Of an adapter, of another kind of layers, of an image."""
    blocks = EngineBlocks()
    blocks.apply(batch(stored(TOKENS, **fields)))
    assert len(blocks) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"medium": "GPU", "lora_name": None, "extra_keys": [["red"], None, None]},
        {"medium": "GPU", "cache_salt": "red"},
    ],
    ids=["vLLM", "SGLang"],
)
def test_blocks_with_a_salt_are_those_of_requests_with_it(fields: dict[str, Any]) -> None:
    """The same tokens are others' with another salt or none; later blocks have the salt of their parent."""
    blocks = EngineBlocks()
    later = stored([17, 18]) | {"block_hashes": [b"later"], "parent_block_hash": engine_hash(TOKENS), "medium": "GPU"}
    blocks.apply(batch(stored(TOKENS, **fields), later, as_maps=True))
    prompt = [*TOKENS, 17, 18]
    assert [blocks.leading(prompt, salt) for salt in ("red", "blue", None)] == [8, 0, 0]
    blocks.apply(batch(stored(TOKENS[:4]) | {"block_hashes": [b"one", b"two"]}, as_maps=True))
    assert [blocks.leading(prompt, salt) for salt in ("red", "blue", None)] == [8, 0, 4]


def test_a_block_in_two_places_is_held_until_it_is_in_none() -> None:
    """A block that leaves the GPU may be in host memory still."""
    blocks = EngineBlocks()
    blocks.apply(batch(stored(TOKENS, medium="GPU"), stored(TOKENS, medium="CPU")))
    gone = removed(TOKENS[:2], TOKENS[:4], TOKENS)
    blocks.apply(batch({**gone, "medium": "GPU"}))
    assert blocks.leading(TOKENS) == 6
    blocks.apply(batch({**gone, "medium": "CPU"}))
    assert blocks.leading(TOKENS) == 0


def test_a_block_that_is_offloaded_has_no_tokens() -> None:
    """What vLLM tells of a block that it copies to another medium is its hash; others there mean nothing."""
    blocks = EngineBlocks()
    blocks.apply(batch(stored(TOKENS, medium="GPU", group_idx=0), as_maps=True))
    placeholder = {"token_ids": [], "block_size": 0, "medium": "CPU", "group_idx": 0}
    blocks.apply(batch(stored(TOKENS) | placeholder, stored([1, 2]) | placeholder, as_maps=True))
    gone = removed(TOKENS[:2], TOKENS[:4], TOKENS) | {"medium": "GPU", "group_idx": 0}
    blocks.apply(batch(gone, as_maps=True))
    assert (blocks.leading(TOKENS), len(blocks)) == (6, 3)
    later = stored([17, 18]) | {"block_hashes": [b"later"], "parent_block_hash": engine_hash(TOKENS), "medium": "GPU"}
    blocks.apply(batch(later, as_maps=True))
    assert blocks.leading([*TOKENS, 17, 18]) == 8


def test_blocks_of_another_size_leave_the_others_alone() -> None:
    """vLLM tells of a part of a block as well, with its own size."""
    blocks = EngineBlocks()
    part = stored(TOKENS) | {"block_hashes": [b"part"], "token_ids": [17], "block_size": 1}
    blocks.apply(batch(stored(TOKENS), part | {"parent_block_hash": engine_hash(TOKENS)}))
    assert blocks.leading(TOKENS) == 6


def test_pairs_of_tokens_are_those_of_their_first_ones() -> None:
    """SGLang tells each token with the next one where it drafts with EAGLE."""
    blocks = EngineBlocks()
    pairs = list(zip(TOKENS, [*TOKENS[1:], 17], strict=True))
    blocks.apply(batch(stored(TOKENS) | {"token_ids": pairs}))
    assert blocks.leading(TOKENS) == 6


def test_blocks_before_an_image_are_those_of_the_tokens() -> None:
    """Those with it are not."""
    blocks = EngineBlocks()
    fields = {"medium": "GPU", "lora_name": None, "extra_keys": [None, [["image", 0]], None]}
    blocks.apply(batch(stored(TOKENS, **fields)))
    assert blocks.leading(TOKENS) == 2


def test_memory_is_bounded() -> None:
    """Blocks beyond the bound are not known."""
    blocks = EngineBlocks(max_blocks=2)
    blocks.apply(batch(stored(TOKENS)))
    assert (len(blocks), blocks.leading(TOKENS)) == (2, 4)


@example(b"\xa3\x00\x00\x80")
@given(st.binary(max_size=60) | st.recursive(st.integers() | st.text() | st.none(), st.lists).map(msgspec.json.encode))
def test_anything_else_is_refused(data: bytes) -> None:
    """What is no batch raises BadEvents and nothing else."""
    try:
        EngineBlocks().apply(data)
    except BadEvents:
        return


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockStored", "block_hashes": [1]},
        stored(TOKENS) | {"token_ids": [1]},
        stored(TOKENS) | {"token_ids": "text"},
        stored(TOKENS) | {"block_size": 0},
        {"type": "BlockRemoved"},
    ],
)
def test_a_bad_event_is_refused(event: dict[str, Any]) -> None:
    """An event without what it must have."""
    with pytest.raises(BadEvents):
        EngineBlocks().apply(batch(event))


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    async with AsyncExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        yield await stack.enter_async_context(Publisher(context).serving())


async def test_missed_events_come_from_the_replay(publisher: Publisher) -> None:
    """A gateway that starts later than the engine, and a message that was lost."""
    await publisher.publish(stored(TOKENS[:2]))
    subscription = Subscription(configured_source(publisher.address))
    async with background_tasks() as tasks:
        tasks.start(subscription.follow())
        await publisher.wait_for_subscriber()
        await publisher.publish(stored(TOKENS[:4]), is_lost=True)
        await publisher.publish(stored([1, 2]))
        await until(lambda: subscription.blocks.leading([1, 2]) == 2)
        assert subscription.blocks.leading(TOKENS) == 4
        assert subscription.blocks.is_whole


async def test_what_an_engine_holds_is_known_before_its_next_event(publisher: Publisher) -> None:
    """A worker that starts while the engine is idle."""
    await publisher.publish(stored(TOKENS))
    subscription = Subscription(configured_source(publisher.address))
    async with background_tasks() as tasks:
        tasks.start(subscription.follow())
        await until(lambda: subscription.blocks.leading(TOKENS) == 6)
        assert subscription.blocks.is_whole


async def test_a_replay_that_begins_later_is_known_from_there(publisher: Publisher) -> None:
    """Blocks of before are not; what is stored since then counts, without another event."""
    await publisher.publish(stored(TOKENS), is_logged=False)
    await publisher.publish(stored([1, 2]))
    subscription = Subscription(configured_source(publisher.address))
    async with background_tasks() as tasks:
        tasks.start(subscription.follow())
        await until(lambda: subscription.blocks.leading([1, 2]) == 2)
        assert (subscription.blocks.leading(TOKENS), subscription.blocks.is_whole) == (0, False)


async def test_an_engine_that_was_killed_holds_nothing_once_it_is_back() -> None:
    """Before its first event, and also where it has published more by then than was known."""
    subscriptions: list[Subscription] = []
    async with background_tasks() as tasks:
        address = None
        for held in ([TOKENS], [], [[1, 2], [3, 4], [5, 6]], [[7, 8]]):
            # The end of the context frees the address.
            with zmq.asyncio.Context() as context:
                async with Publisher(context, address=address).serving() as engine:
                    address = engine.address
                    for tokens in held:
                        await engine.publish(stored(tokens))
                    if not subscriptions:
                        subscriptions.append(Subscription(configured_source(address)))
                        tasks.start(subscriptions[0].follow())
                    blocks = subscriptions[0].blocks
                    count = sum(map(len, held)) // BLOCK_TOKENS
                    await until(lambda: blocks.is_whole and len(blocks) == count, within=10)  # noqa: B023
                    assert all(blocks.leading(tokens) == len(tokens) for tokens in held)


async def test_an_engine_that_is_gone_without_a_word_is_connected_anew(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stays open and nothing comes through, as when a machine has lost its power."""
    monkeypatch.setattr("gateway.routing.prefixes.kv_subscription._HEARTBEAT", 0.5)
    port, connections = int(publisher.address.rpartition(":")[2]), [asyncio.Event()]

    async def pass_on(client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        is_gone = connections[-1]
        connections.append(asyncio.Event())
        server, questions = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(client, questions, is_gone), copy(server, answers, is_gone))

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, is_gone: asyncio.Event) -> None:
        while data := await source.read(4096):
            if not is_gone.is_set():
                target.write(data)
        target.close()

    proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    subscription = Subscription(EventSource(f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", None))
    async with proxy, background_tasks() as tasks:
        tasks.start(subscription.follow())
        await publisher.wait_for_subscriber()
        await publisher.publish(stored(TOKENS))
        await until(lambda: subscription.blocks.leading(TOKENS) == 6)
        connections[0].set()
        await publisher.wait_for_subscriber()
        await publisher.publish(stored([1, 2]))
        await until(lambda: subscription.blocks.leading([1, 2]) == 2)


async def test_where_events_are_lost_for_good_nothing_is_believed(publisher: Publisher) -> None:
    """All blocks are forgotten, and what is stored later is known again."""
    subscription = Subscription(configured_source(publisher.address))
    async with background_tasks() as tasks:
        tasks.start(subscription.follow())
        await publisher.wait_for_subscriber()
        await publisher.publish(stored(TOKENS))
        await until(lambda: subscription.blocks.leading(TOKENS) == 6)
        assert subscription.blocks.is_whole
        await publisher.publish(removed(TOKENS), is_lost=True, is_logged=False)
        await publisher.publish(stored([1, 2]))
        await until(lambda: subscription.blocks.leading([1, 2]) == 2)
        assert subscription.blocks.leading(TOKENS) == 0
        assert not subscription.blocks.is_whole
        await publisher.publish(CLEARED)
        await until(lambda: subscription.blocks.is_whole)


async def test_an_engine_that_starts_again_holds_nothing(publisher: Publisher) -> None:
    """Its numbers begin again."""
    subscription = Subscription(configured_source(publisher.address))
    async with background_tasks() as tasks:
        tasks.start(subscription.follow())
        await publisher.wait_for_subscriber()
        await publisher.publish(stored(TOKENS))
        await publisher.publish(stored([1, 2]))
        await until(lambda: subscription.blocks.leading([1, 2]) == 2)
        publisher.number = 0
        publisher.log.clear()
        await publisher.publish(stored([3, 4]))
        await until(lambda: subscription.blocks.leading([3, 4]) == 2)
        assert subscription.blocks.leading(TOKENS) == 0
