"""A Mooncake store of several engines, and its faults."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.codecs.registry import PLAIN
from prefix_store.eviction.access import Access
from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes
from prefix_store.tiers.cancellation import CancelToken
from prefix_store.tiers.mooncake.mooncake_tier import MooncakeTier
from prefix_store.tiers.mooncake.pool import Pool
from prefix_store.tiers.mooncake.settings import read_settings
from tests.cache.entries.entry_examples import until
from tests.prefix_store.mooncake_master import MooncakeMaster
from tests.prefix_store.tiers.blocks import Memory, chain, content, format_of
from tests.prefix_store.tiers.test_contract import kept, restored

pytestmark = pytest.mark.timeout(120)
DEADLINE = 20.0
Tiers = Callable[..., MooncakeTier]


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """A master for one test, not started yet."""
    master = MooncakeMaster(tmp_path)
    yield master
    master.stop()


@pytest.fixture
async def tiers() -> AsyncIterator[Tiers]:
    """Makes tiers with a common namespace, which share blocks."""
    namespace = secrets.token_bytes(16)
    async with AsyncExitStack() as stack:

        def make(master: MooncakeMaster, form: FrameFormat | None = None, **settings: object) -> MooncakeTier:
            tier = MooncakeTier(master.settings(**settings), form or format_of(), namespace)
            stack.push_async_callback(tier.close)
            return tier

        yield make


async def test_what_one_engine_writes_another_reads(master: MooncakeMaster, tiers: Tiers) -> None:
    """The reader needs no memory in the pool; the block is lost with the engine that stores it."""
    writer, reader = tiers(master), tiers(master, global_segment_size=0)
    await asyncio.gather(writer.connected(), reader.connected())
    blocks = chain("a", 30)
    assert await kept(writer, blocks) == 30
    assert await restored(reader, blocks) == 30
    assert await kept(reader, blocks) == 30
    assert reader.counts.writes == 0
    await writer.close()
    assert await restored(reader, blocks) == 0
    assert reader.counts.bad_frames == {}


async def test_a_model_is_cleared_alone(master: MooncakeMaster) -> None:
    """Blocks of other models stay in the shared store."""
    one, other = (MooncakeTier(master.settings(), format_of(), secrets.token_bytes(16)) for _ in range(2))
    await asyncio.gather(one.connected(), other.connected())
    blocks = chain("a", 5)
    for tier in (one, other):
        assert await kept(tier, blocks) == 5
    assert await one.clear() == 5
    assert (await one.lookup(blocks), await other.lookup(blocks)) == (0, 5)
    await asyncio.gather(one.close(), other.close())


async def test_a_prefix_that_was_wrong_is_discarded(master: MooncakeMaster, tiers: Tiers) -> None:
    """The blocks after the kept ones are removed; descendants of other chains are only unreachable."""
    tier = tiers(master)
    await tier.connected()
    blocks = chain("a", 6)
    await kept(tier, blocks)
    assert await tier.discard(blocks[:5], 2) == 3
    assert await restored(tier, blocks) == 2
    assert await kept(tier, blocks, 2.0) == 6
    assert tier.counts.writes == 9


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (lambda frame: np.concatenate([frame[:-1], frame[-1:] ^ 1]), "checksum"),
        (lambda frame: frame[:-1], "frame bytes"),
        (lambda frame: np.concatenate([frame, frame]), "frame bytes"),
        (lambda frame: np.zeros_like(frame), "magic"),
    ],
)
async def test_a_bad_frame_is_a_miss_and_is_removed(
    master: MooncakeMaster, bad: Callable[[np.ndarray], np.ndarray], field: str
) -> None:
    """A flipped, truncated, long or empty frame is never restored, and is replaced by a valid one."""
    form, namespace, blocks = format_of(), secrets.token_bytes(16), chain("a", 4)
    tier = MooncakeTier(master.settings(), form, namespace)
    await tier.connected()
    await kept(tier, blocks)
    pool = Pool(master.settings(), namespace)
    await asyncio.to_thread(pool.connect)
    frame = np.empty(form.frame_bytes, np.uint8)
    form.seal(blocks[2], [content(blocks[2])], frame)
    written = bad(frame)
    (lane,) = pool.lane(1, len(written))
    lane[:] = written
    key = form.stored_key(blocks[2].key)
    pool.remove([key])
    assert pool.save([key], [lane]) == [True]
    assert await tier.frame(key, form.stored_key(blocks[2].parent)) is None
    assert pool.save([key], [lane]) == [True]
    assert await restored(tier, blocks) == 2
    assert tier.counts.bad_frames.total() == 2
    assert field in tier.counts.bad_frames
    assert await tier.lookup(blocks) == 2
    assert await kept(tier, blocks, 2.0) == 4
    assert await restored(tier, blocks) == 4
    pool.leave()
    await tier.close()


async def test_a_store_that_begins_later_is_found(broken: MooncakeMaster, tiers: Tiers) -> None:
    """Until then look-ups and writes do nothing, without waiting."""
    tier, blocks = tiers(broken), chain("a", 4)
    async with asyncio.timeout(5.0):
        assert await kept(tier, blocks) == 0
        assert await restored(tier, blocks) == 0
        assert await tier.lookup(blocks) == await tier.clear() == await tier.discard(blocks, 0) == 0
        assert await tier.frame(blocks[0].key, blocks[0].parent) is None
    assert tier.counts.rejected == {"there is no connection": 4}
    broken.start()
    async with asyncio.timeout(DEADLINE):
        await tier.connected()
    assert await kept(tier, blocks) == 4
    await tier.close()
    broken.stop()


async def test_what_lies_in_the_working_directory_is_not_run(
    master: MooncakeMaster, tiers: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child process tries to join first."""
    (tmp_path / "json.py").write_text("raise SystemExit(1)", "utf-8")
    monkeypatch.chdir(tmp_path)
    async with asyncio.timeout(DEADLINE):
        await tiers(master).connected()


async def test_who_leaves_while_it_joins_leaves_nothing_in_the_pool(broken: MooncakeMaster, tiers: Tiers) -> None:
    """The event loop has not noticed yet that it has joined; no memory stays in the pool."""
    broken.start()
    tier = tiers(broken)
    await asyncio.sleep(0)
    time.sleep(4.0)  # noqa: ASYNC251 (the joining thread continues meanwhile, and the loop does not notice)
    await tier.close()
    other = tiers(broken, global_segment_size=0)
    await other.connected()
    assert await kept(other, chain("a", 4)) == 0
    assert other.counts.rejected == {"there is no room": 4}
    await other.close()
    broken.stop()


async def test_what_comes_before_a_host_that_is_away_is_restored(
    master: MooncakeMaster, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake has a status per block, and the first three are local."""
    tier, blocks = tiers(master), chain("a", 6)
    await tier.connected()
    await kept(tier, blocks)
    load = Pool.load

    def failing(pool: Pool, keys: Sequence[bytes], frames: Sequence[Bytes]) -> list[int]:
        return [*load(pool, keys, frames)[:3], -800, *load(pool, keys, frames)[4:]]

    monkeypatch.setattr(Pool, "load", failing)
    assert await restored(tier, blocks) == 3
    assert tier.counts.io_errors == {"EHOSTUNREACH": 1}


async def test_a_store_that_goes_is_a_miss_until_it_is_back(
    broken: MooncakeMaster, tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the first call waits for it. Its contents are lost; it is used again without a restart of the engine."""
    broken.start()
    tier, blocks = tiers(broken), chain("a", 4)
    await tier.connected()
    await kept(tier, blocks)
    broken.stop()
    async with asyncio.timeout(DEADLINE):
        assert await tier.lookup(blocks) == 0
    errors = tier.counts.io_errors["ECONNREFUSED"]  # one of the look-up, and maybe one of a check in the background
    async with asyncio.timeout(5.0):
        assert await tier.lookup(blocks) == 0
        assert await restored(tier, blocks) == 0
        assert await kept(tier, chain("b", 2)) == 0
    assert 1 <= errors <= 2
    warnings = [record.getMessage() for record in caplog.records if "failed while" in record.getMessage()]
    assert warnings[0] == "failed while finding KV blocks in Mooncake: [Errno 111] the master does not answer"
    assert tier.counts.rejected == {"there is no connection": 2}
    broken.start()

    async def is_back() -> bool:
        return await kept(tier, blocks) == 4

    await until(is_back, within=DEADLINE, every=0.1)
    assert await restored(tier, blocks) == 4
    await tier.close()
    broken.stop()


async def test_who_gives_up_on_a_frozen_store_has_its_memory_back(broken: MooncakeMaster, tiers: Tiers) -> None:
    """A cancellation frees memory at once, though Mooncake waits for half a minute."""
    broken.start()
    tier, blocks = tiers(broken), chain("a", 4)
    await tier.connected()

    async def is_there() -> bool:
        # The client's own segment may not be known yet, for a moment after the connection is made.
        await kept(tier, blocks)
        return await restored(tier, blocks) == 4

    await until(is_there, within=DEADLINE, every=0.1)
    broken.freeze()
    memory, cancel = Memory(4), CancelToken()
    reading = asyncio.create_task(tier.read(blocks, memory.all(4), Access(1.0), cancel))
    await asyncio.wait((reading,), timeout=0.2)
    assert not reading.done()
    async with asyncio.timeout(5.0):
        await asyncio.to_thread(cancel.set)
        assert await reading == 0
    broken.thaw()
    assert await restored(tier, blocks) == 4
    assert all(memory.is_untouched(place) for place in range(4))
    await tier.close()
    broken.stop()


async def test_a_full_pool_makes_room_or_says_so(broken: MooncakeMaster, tiers: Tiers) -> None:
    """Recently used blocks are not evicted; later they are."""
    layout = BlockLayout("float16", (1, 2, 1, 512, 512), "lphtd")
    form = FrameFormat(layout, PLAIN)
    broken.start()
    tier = tiers(broken, form, global_segment_size=16 * 2**20)
    await tier.connected()
    source = np.zeros(layout.nbytes, np.uint8)
    first, then = chain("a", 40), chain("b", 3)
    count = await tier.write(first, [[source]] * 40, Access(0.0))
    assert 8 <= count < 16
    assert tier.counts.rejected == {"there is no room": 40 - count}

    async def has_room() -> bool:
        return await tier.write(then, [[source]] * 3, Access(1.0)) == 3

    await until(has_room, within=DEADLINE, every=0.1)
    into = np.ones(layout.nbytes, np.uint8)
    assert await tier.read(then, [[into]] * 3, Access(2.0)) == 3
    assert not into.any()
    await tier.close()
    broken.stop()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file or directory"),
        ("", "this is no configuration of Mooncake: Expecting value"),
        ("[]", "this is no configuration of Mooncake: Missing required config field: local_hostname"),
        ('{"local_hostname": "a"}', "Missing required config field: metadata_server"),
        ('{"global_segment_size": "much"}', "could not convert string to float: 'much'"),
        ('{"local_buffer_size": 0}', "local_buffer_size is 0, expected at least some megabytes"),
        ('{"protocol": ""}', "Invalid protocol: ''"),
        ('{"device_name": 5}', "device_name is 5, expected a name"),
        ('{"global_segment_size": 1000}', "global_segment_size is 1000, expected 0 or at least 16777216"),
        ('{"global_segment_size": 1e999}', "this is no configuration of Mooncake: cannot convert float infinity"),
        ("[" * 200_000, "this is no configuration of Mooncake: maximum recursion depth exceeded"),
    ],
)
def test_a_bad_file_is_named(master: MooncakeMaster, tmp_path: Path, text: str | None, says: str) -> None:
    """The message has the error of Mooncake's own reader, if there is one."""
    path = tmp_path / "mooncake.json"
    if text is not None:
        if text.startswith("{") and "local_hostname" not in text:
            text = json.dumps({**json.loads(master.settings().read_text("utf-8")), **json.loads(text)})
        path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r".") as caught:
        read_settings(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
