"""Opens the places that a configuration names, and closes them in order."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from prefix_store.codecs.codec import Codec
from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.codecs.registry import PLAIN
from prefix_store.eviction.hazard import HazardIndex
from prefix_store.frames.layout import BlockLayout
from prefix_store.index.index import RedisIndex, open_index
from prefix_store.peers.client import PeerClient
from prefix_store.peers.server import BlockServer
from prefix_store.store.config import StoreConfig
from prefix_store.store.fleet import Fleet
from prefix_store.store.owners import DISK, MEMORY, Owners
from prefix_store.store.store import PrefixStore
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.host_memory import HostMemory
from prefix_store.tiers.tier import Tier

_INSTANCE_BYTES = 16


@dataclass(slots=True)
class OpenStore:
    """A store, and what stands around it."""

    store: PrefixStore
    server: BlockServer | None
    """Gives blocks to other engines; None: without a secret nobody may ask."""
    index: RedisIndex | None


@dataclass(slots=True)
class _Removals:
    """Passes on what tiers have removed, from before there are owners to tell."""

    owners: Owners | None = field(default=None)

    def of(self, tier: str, keys: Sequence[bytes]) -> None:
        if self.owners is not None:
            self.owners.forget(tier, keys)


@asynccontextmanager
async def open_store(config: StoreConfig, namespace: bytes, layout: BlockLayout) -> AsyncIterator[OpenStore]:
    """The store of one model's blocks.

    Args:
        namespace: digest of the model's fingerprint, 16 bytes.
        layout: of a block.

    Raises:
        ValueError: a size holds no frame, a codec cannot write blocks of this layout, or a URL is none.
        OSError: the folder cannot be used.
    """
    removals = _Removals()
    async with AsyncExitStack() as stack:
        tiers: dict[str, Tier] = {}
        if config.memory_bytes:
            memory = HostMemory(
                _format("memory", layout, config.memory_codec),
                config.memory_bytes,
                HazardIndex(),
                lambda keys: removals.of(MEMORY, keys),
            )
            tiers[MEMORY] = memory
            stack.push_async_callback(memory.close)
        disk = None
        if config.disk is not None:
            disk = DiskTier(
                config.disk,
                _format("disk", layout, config.disk_codec),
                config.disk_bytes,
                HazardIndex,
                lambda keys: removals.of(DISK, keys),
            )
            tiers[DISK] = disk
            stack.push_async_callback(disk.close)
        if not config.index:
            yield OpenStore(PrefixStore(tiers), None, None)
            return
        index = await stack.enter_async_context(open_index(config.index, namespace))
        instance = secrets.token_hex(_INSTANCE_BYTES)
        owners = removals.owners = Owners(index, config.name, config.address if config.secret else "", instance)
        if MEMORY in tiers:
            owners.speak_for_memory(tiers[MEMORY])
        if disk is not None:
            await owners.speak_for_disk(disk)
        fleet = server = None
        if config.secret:
            client = PeerClient(config.secret)
            stack.push_async_callback(client.close)
            fleet = Fleet(index, client, _formats(layout, config), owners.is_own)
            server = BlockServer(list(tiers.values()), config.secret, instance)
        yield OpenStore(PrefixStore(tiers, owners, fleet), server, index)


def _format(place: str, layout: BlockLayout, codec: Codec) -> FrameFormat:
    try:
        return FrameFormat(layout, codec)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _formats(layout: BlockLayout, config: StoreConfig) -> list[FrameFormat]:
    """What this engine can read from others: every bit, and its own lossy form."""
    lossy = config.lossy_codec
    return [FrameFormat(layout, codec) for codec in (PLAIN, *([lossy] if lossy else []))]
