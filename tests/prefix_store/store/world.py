"""Engines with a store over real tiers, a real index and real sockets."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web

from benchmarks.prefix.claims import claims_by_owner
from prefix_store.codecs.codec import Codec
from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.codecs.registry import PLAIN
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.frame import HEADER_BYTES
from prefix_store.index.index import RedisIndex
from prefix_store.store.config import StoreConfig
from prefix_store.store.location import Location
from prefix_store.store.open_store import OpenStore, open_store
from prefix_store.store.owners import Owners
from prefix_store.store.store import PrefixStore, Restored
from prefix_store.tiers.cancellation import CancelToken
from tests.prefix_store.peers.world import SECRET
from tests.prefix_store.tiers.blocks import LAYOUT, NAMESPACE, Memory, format_of

ROOM = 3_000 * (LAYOUT.nbytes + HEADER_BYTES + 64)
"""Bytes for three thousand blocks, in memory or on disk."""


@dataclass
class Engine:
    """A running engine."""

    opened: OpenStore
    config: StoreConfig

    @property
    def store(self) -> PrefixStore:
        return self.opened.store

    @property
    def index(self) -> RedisIndex:
        assert self.opened.index is not None
        return self.opened.index

    @property
    def owners(self) -> Owners:
        assert self.opened.store.owners is not None
        return self.opened.store.owners

    async def keep(self, blocks: Sequence[BlockId], exact: bool = True) -> None:
        """Stores a chain; returns when the index has it."""
        await self.store.keep(blocks, Memory(len(blocks)).fill(blocks), Access(time.monotonic()), exact, CancelToken())
        if self.opened.index is not None:
            await self.opened.index.flush()

    async def finds(self, blocks: Sequence[BlockId], count: int) -> Location:
        """Where a chain is, once `count` blocks are found: on a busy machine a place may be late."""
        return await self._until(blocks, lambda location: location.blocks == count)

    async def leading(self, blocks: Sequence[BlockId], **leading: int) -> Location:
        """The same, once each tier has so many."""
        return await self._until(blocks, lambda location: location.leading == leading)

    async def _until(self, blocks: Sequence[BlockId], condition: Callable[[Location], bool]) -> Location:
        deadline = time.monotonic() + 20.0
        while not condition(location := await self.store.locate(blocks)):
            assert time.monotonic() < deadline, f"{location} was found for 20 s"
            await asyncio.sleep(0.02)
        return location

    async def restore(
        self,
        blocks: Sequence[BlockId],
        location: Location,
        memory: Memory,
        block_seconds: float | None = None,
        cancel: CancelToken | None = None,
    ) -> Restored:
        """Restores into the first blocks of a memory; checks that the rest is unchanged."""
        count = len(blocks)
        access = Access(time.monotonic())
        restored = await self.store.restore(
            blocks, memory.all(count), location, block_seconds, access, cancel or CancelToken()
        )
        assert all(memory.is_untouched(place) for place in range(restored.blocks, memory.blocks))
        return restored

    async def claims(self) -> dict[str, int]:
        """The number of claimed blocks by owner."""
        return {name: len(keys) for name, keys in (await claims_by_owner(self.config.index, self.index)).items()}


@asynccontextmanager
async def engine(
    index: str = "",
    name: str = "engine-1",
    memory_bytes: int = 0,
    memory_codec: Codec = PLAIN,
    disk: Path | None = None,
    disk_codec: Codec = PLAIN,
) -> AsyncIterator[Engine]:
    """An engine with these places, a disk of `ROOM`; with an index peers can read from it."""
    config = StoreConfig(
        memory_bytes=memory_bytes,
        memory_codec=memory_codec,
        disk=disk,
        disk_bytes=ROOM,
        disk_codec=disk_codec,
        index=index,
        name=name,
        secret=SECRET if index else "",
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if index:
            config = replace(config, address=f"http://127.0.0.1:{listener.getsockname()[1]}")
        async with open_store(config, NAMESPACE, LAYOUT) as opened:
            application = web.Application()
            application.add_routes(opened.server.routes() if opened.server is not None else [])
            runner = web.AppRunner(application, shutdown_timeout=0.1)
            await runner.setup()
            await web.SockSite(runner, listener).start()
            if opened.index is not None:
                await opened.index.next_heartbeat()
            yield Engine(opened, config)
            await runner.cleanup()


def file_of(folder: Path, blocks: Sequence[BlockId], place: int, form: FrameFormat | None = None) -> Path:
    """The file of a chain's block on disk."""
    key = (form or format_of()).stored_key(blocks[place].key).hex()
    return next((folder / "blocks").glob(f"*/{key}-*"))
