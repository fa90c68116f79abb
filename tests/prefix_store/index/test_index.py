"""The index as processes use it, on a real Valkey."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from prefix_store.index.index import RedisIndex, open_index
from prefix_store.index.local_owner import CodecInventory
from prefix_store.index.match import NO_MATCH
from prefix_store.index.owner import Details, TierKind
from tests.cache.entries.entry_examples import until
from tests.cache.valkey import Valkey
from tests.prefix_store.index.blocks import PATIENT, Shelf, chain, new_namespace, outline, owner


@contextlib.asynccontextmanager
async def index_of(
    valkey: Valkey, namespace: bytes, lifetime: float = 30.0, claim_seconds: int = 3600
) -> AsyncIterator[RedisIndex]:
    """One process's index, with long deadlines."""
    async with open_index(
        valkey.url, namespace, deadline=PATIENT, heartbeat=0.05, lifetime=lifetime, claim_seconds=claim_seconds
    ) as index:
        yield index


async def test_the_longest_prefix_is_found_with_its_holders(valkey: Valkey) -> None:
    """Runs of blocks that the same holders have, up to the first block without a holder."""
    namespace = new_namespace()
    keys = chain(namespace, 10)
    async with index_of(valkey, namespace) as one, index_of(valkey, namespace) as two:
        await owner(one, "a", *keys[:7])
        await owner(two, "b", *keys[:3])
        disk = two.own("disk", TierKind.DISK, Shelf().inventory, lambda: Details("http://host:1", "boot-7", 4, 400))
        await two.next_heartbeat()
        disk.publish(keys[5:9], codec=2)
        await two.flush()
        await one.next_heartbeat()
        match = await one.match(keys)
        assert outline(match) == [(3, {"a", "b"}), (2, {"a"}), (2, {"a", "disk"}), (2, {"disk"})]
        assert match.blocks == 9
        (last,) = match.runs[-1].holders
        assert (last.tier, last.codec, last.owner.details) == (
            TierKind.DISK,
            2,
            Details("http://host:1", "boot-7", 4, 400),
        )
        assert (await one.match(keys[8:])).blocks == 1
        assert await one.match(keys[9:]) == await one.match([]) == NO_MATCH


async def test_a_hole_ends_the_match(valkey: Valkey) -> None:
    """Blocks after a block without a holder are not matched."""
    namespace = new_namespace()
    keys = chain(namespace, 10)
    async with index_of(valkey, namespace) as index:
        held = await owner(index, "a", *keys)
        held.forget([keys[4]])
        await index.flush()
        assert (await index.match(keys)).blocks == 4


async def test_a_match_of_thousands_is_one_script(valkey: Valkey, raw: "redis.asyncio.Redis") -> None:
    """A match is one round trip for up to 4,096 blocks."""
    namespace = new_namespace()
    keys = chain(namespace, 5_000)
    async with index_of(valkey, namespace) as index:
        await owner(index, "a", *keys)
        await index.match(keys[:1])  # from here on Redis has the script

        async def scripts() -> int:
            return int((await raw.info("commandstats"))["cmdstat_evalsha"]["calls"])

        connection = index.connection
        asked = []
        ask = connection.ask

        async def counted(*words: object, deadline: float) -> object:
            asked.append(words[0])
            return await ask(*words, deadline=deadline)  # type: ignore[arg-type]

        connection.ask = counted  # type: ignore[method-assign,assignment]
        before = await scripts()
        assert (await index.match(keys[:4_000])).blocks == 4_000
        assert asked == ["match"]
        assert await scripts() > before
        assert (await index.match(keys)).blocks == 5_000
        assert asked == ["match"] * 3


async def test_prompts_of_another_namespace_share_nothing(valkey: Valkey) -> None:
    """Equal keys of another namespace are not found."""
    first, second = new_namespace(), new_namespace()
    keys = chain(first, 3)
    async with index_of(valkey, first) as one, index_of(valkey, second) as two:
        await owner(one, "a", *keys)
        await two.next_heartbeat()
        assert await two.match(keys) == NO_MATCH


async def test_the_dead_hold_nothing(valkey: Valkey) -> None:
    """Claims of an owner without announcements are invalid after its lifetime, and valid again later."""
    namespace = new_namespace()
    keys = chain(namespace, 3)
    async with index_of(valkey, namespace) as reader, index_of(valkey, namespace, lifetime=0.3) as index:
        held = await owner(index, "a", *keys)
        await reader.next_heartbeat()
        assert (await reader.match(keys)).blocks == 3
        await held._announcing.acquire()  # no announcements from here on

        async def is_forgotten() -> bool:
            return await reader.match(keys) == NO_MATCH

        await until(is_forgotten)
        held._announcing.release()
        await index.next_heartbeat()
        await reader.next_heartbeat()
        assert (await reader.match(keys)).blocks == 3


async def test_who_restarts_under_its_name_is_another(valkey: Valkey) -> None:
    """With its new epoch all claims of the old one are invalid."""
    namespace = new_namespace()
    keys = chain(namespace, 3)
    async with index_of(valkey, namespace) as reader, index_of(valkey, namespace) as before:
        old = await owner(before, "host:1", *keys)
        await reader.next_heartbeat()
        assert (await reader.match(keys)).blocks == 3
        async with index_of(valkey, namespace) as after:
            new = await owner(after, "host:1", keys[0])
            assert new.epoch is not None
            assert old.epoch is None or new.epoch > old.epoch
            await reader.next_heartbeat()
            assert outline(await reader.match(keys)) == [(1, {"host:1"})]
            old.publish(keys)  # it has not noticed yet, or is silent
            await before.flush()
            assert (await reader.match(keys)).blocks == 1
            await before.next_heartbeat()
            assert old.epoch is None


async def test_a_disk_outlives_its_processes(valkey: Valkey) -> None:
    """It is the same owner after a restart, also for several processes, until `start_new_epoch`."""
    namespace = new_namespace()
    keys = chain(namespace, 4)
    shelf = Shelf(*keys)
    async with index_of(valkey, namespace) as reader:
        epochs = []
        for _ in range(2):
            async with index_of(valkey, namespace) as one, index_of(valkey, namespace) as two:
                disks = [index.own("disk", TierKind.DISK, shelf.inventory, lasting=True) for index in (one, two)]
                await one.next_heartbeat()
                await two.next_heartbeat()
                await one.flush()
                epochs += [disk.epoch for disk in disks]
                await reader.next_heartbeat()
                assert (await reader.match(keys)).blocks == 4
            assert (await reader.match(keys)).blocks == 4  # while it counts as alive
        assert len(set(epochs)) == 1
        async with index_of(valkey, namespace) as one, index_of(valkey, namespace) as two:
            disks = [index.own("disk", TierKind.DISK, shelf.inventory, lasting=True) for index in (one, two)]
            await one.next_heartbeat()
            await two.next_heartbeat()
            shelf.keys = keys[:2]
            disks[0].start_new_epoch()
            await one.next_heartbeat()
            await two.next_heartbeat()
            assert disks[0].epoch == disks[1].epoch != epochs[0]
            await one.flush()
            await reader.next_heartbeat()
            assert (await reader.match(keys)).blocks == 2


async def test_a_process_that_ends_is_believed_no_more(valkey: Valkey) -> None:
    """The claims of its memory end at once."""
    namespace = new_namespace()
    keys = chain(namespace, 3)
    async with index_of(valkey, namespace) as reader:
        async with index_of(valkey, namespace) as index:
            await owner(index, "a", *keys)
            await reader.next_heartbeat()
            assert (await reader.match(keys)).blocks == 3
        assert await reader.match(keys) == NO_MATCH


async def test_what_a_holder_does_not_have_is_denied(valkey: Valkey) -> None:
    """A claim without a block is found once and then withdrawn."""
    namespace = new_namespace()
    keys = chain(namespace, 5)
    async with index_of(valkey, namespace) as index, index_of(valkey, namespace) as reader:
        await owner(index, "a", *keys)
        await reader.next_heartbeat()
        holder = (await reader.match(keys)).runs[0].holders[0].owner
        reader.remove_claims(holder, keys[2:])
        await reader.flush()
        assert (await reader.match(keys)).blocks == 2


async def test_claims_end_unless_they_are_repeated(valkey: Valkey, raw: "redis.asyncio.Redis") -> None:
    """Claims of blocks that their owner no longer holds expire; others are repeated."""
    namespace = new_namespace()
    keys = chain(namespace, 3)
    shelf = Shelf(*keys[:2])
    async with index_of(valkey, namespace, claim_seconds=1) as index:
        held = index.own("a", TierKind.MEMORY, shelf.inventory)
        await index.next_heartbeat()
        held.publish(keys)

        async def has_two() -> bool:
            return (await index.match(keys)).blocks == 2

        await index.flush()
        assert (await index.match(keys)).blocks == 3
        await until(has_two)
        for _ in range(4):  # more than two lifetimes of a claim
            await asyncio.sleep(0.6)
            assert (await index.match(keys)).blocks == 2
        assert await raw.exists(index.connection.block_names + keys[2]) == 0


async def test_what_readers_use_lasts(valkey: Valkey) -> None:
    """Any reader's use extends a claim; it makes no new ones."""
    namespace = new_namespace()
    keys = chain(namespace, 3)
    async with (
        index_of(valkey, namespace, claim_seconds=1) as index,
        index_of(valkey, namespace, claim_seconds=1) as reader,
    ):
        held = index.own("b", TierKind.MEMORY, Shelf().inventory)
        await index.next_heartbeat()
        held.publish(keys[:2])
        await index.flush()
        await reader.next_heartbeat()
        holder = (await reader.match(keys)).runs[0].holders[0].owner
        for _ in range(8):  # more than two lifetimes of a claim
            reader.refresh_claims(holder, [keys[0], keys[2]])
            await reader.flush()
            await asyncio.sleep(0.5)
            assert (await reader.match(keys)).blocks >= 1
        assert (await reader.match(keys)).blocks == 1
        assert await reader.match(keys[2:]) == NO_MATCH


async def test_every_key_has_an_end(valkey: Valkey, raw: "redis.asyncio.Redis") -> None:
    """All keys of an unused index expire."""
    namespace = new_namespace()
    keys = chain(namespace, 3)
    async with index_of(valkey, namespace) as index:
        held = await owner(index, "a", *keys)
        held.touch(keys)
        await index.flush()
        found = [name async for name in raw.scan_iter(b"keepgate:*")]
        assert {name.split(b":")[1] for name in found} == {b"live", b"owners", b"kv"}
        assert all([await raw.pttl(name) > 0 for name in found])


async def test_a_popular_block_keeps_a_few_holders(valkey: Valkey, raw: "redis.asyncio.Redis") -> None:
    """A block keeps sixteen holders, so that matches stay fast: dead ones are dropped first, then the oldest."""
    namespace = new_namespace()
    (key,) = chain(namespace, 1)
    async with index_of(valkey, namespace) as index:
        engines = [await owner(index, f"engine-{number}", key) for number in range(16)]
        for dead in engines[5:7]:
            await index.disown(dead)
        for number in range(16, 20):
            await owner(index, f"engine-{number}", key)
        await index.next_heartbeat()
        ((blocks, found),) = outline(await index.match([key]))
        assert blocks == 1
        assert found == {f"engine-{number}" for number in range(2, 20)} - {"engine-5", "engine-6"}
        assert await raw.strlen(index.connection.block_names + key) == 16 * 11


async def test_an_unreadable_value_is_no_holder(valkey: Valkey, raw: "redis.asyncio.Redis") -> None:
    """A foreign value ends a match, and the next claim replaces it."""
    namespace = new_namespace()
    keys = chain(namespace, 4)
    async with index_of(valkey, namespace) as index:
        held = await owner(index, "a", *keys)
        await raw.set(index.connection.block_names + keys[2], b"something else")
        await index.next_heartbeat()
        assert (await index.match(keys)).blocks == 2
        held.publish(keys)
        await index.flush()
        assert (await index.match(keys)).blocks == 4


async def test_an_inventory_brings_nothing_back(valkey: Valkey) -> None:
    """Blocks withdrawn while the inventory is claimed are not claimed."""
    namespace = new_namespace()
    keys = chain(namespace, 2_000)
    async with index_of(valkey, namespace) as index:
        shelf = Shelf(*keys)
        begun = asyncio.Event()

        def inventory() -> list[CodecInventory]:
            begun.set()
            return shelf.inventory()

        held = index.own("a", TierKind.MEMORY, inventory)
        await begun.wait()
        del shelf.keys[1_000:]
        held.forget(keys[:999:-1])
        await index.next_heartbeat()

        async def is_claimed() -> bool:
            await index.flush()
            return (await index.match(keys)).blocks >= 1_000

        await until(is_claimed)
        while held._claiming.locked():  # noqa: ASYNC110 (to look at every turn of the loop)
            await asyncio.sleep(0)
        await index.flush()
        assert (await index.match(keys)).blocks == 1_000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"namespace": b"model"}, "16 of a fingerprint"),
        ({"lifetime": 0.5}, "less than the lifetime"),
        ({"deadline": 0.0}, "more than 0"),
    ],
)
async def test_what_cannot_be_is_refused(wrong: dict[str, object], message: str) -> None:
    """The message names the field and what is expected."""
    options = {"namespace": new_namespace(), **wrong}
    with pytest.raises(ValueError, match=message):
        async with open_index("redis://127.0.0.1:1", **options):  # type: ignore[arg-type]
            pass


async def test_wrong_keys_are_refused(valkey: Valkey) -> None:
    """Invalid keys raise ValueError, unlike an outage."""
    async with index_of(valkey, new_namespace()) as index:
        held = await owner(index, "a")
        with pytest.raises(ValueError, match="16 bytes"):
            await index.match([b"short"])
        with pytest.raises(ValueError, match="16 bytes"):
            held.publish([b"short"])
        with pytest.raises(ValueError, match="codec is 16"):
            held.publish([bytes(16)], codec=16)
        with pytest.raises(ValueError, match="name is empty"):
            index.own("", TierKind.MEMORY, Shelf().inventory)
