"""Opens the parts of a configured store, and closes them in order."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.codecs.registry import PLAIN
from prefix_store.eviction.policies import DEFAULT_POLICY, POLICIES
from prefix_store.frames.layout import BlockLayout
from prefix_store.index.index import RedisIndex, open_index
from prefix_store.peers.client import PeerClient
from prefix_store.peers.server import BlockServer
from prefix_store.store.config import StoreConfig
from prefix_store.store.owners import DISK, MEMORY, MOONCAKE, Owners
from prefix_store.store.peer_reader import PeerReader
from prefix_store.store.store import PrefixStore
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.host_memory import HostMemory
from prefix_store.tiers.mooncake.mooncake_tier import MooncakeTier
from prefix_store.tiers.tier import Tier

_INSTANCE_BYTES = 16


@dataclass(slots=True)
class OpenStore:
    """A store, its server and index."""

    config: StoreConfig
    namespace: bytes
    block_bytes: int
    """Of a block as the engine has it."""
    store: PrefixStore
    server: BlockServer | None
    """Sends blocks to other engines; None without a secret."""
    index: RedisIndex | None


@dataclass(slots=True)
class _Removals:
    """Forwards the tiers' removals to the owners, once these exist."""

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
        ValueError: a size is less than a frame, a codec cannot write blocks of this layout, the index's URL is invalid,
            the engine has no name in it, or Mooncake cannot be used. The message begins with the field of the
            configuration.
        OSError: the folder cannot be used.
    """
    removals, policy = _Removals(), POLICIES[DEFAULT_POLICY]
    async with AsyncExitStack() as stack:
        tiers: dict[str, Tier] = {}
        if config.memory_bytes:
            with _named("memory_codec"):
                memory_format = FrameFormat(layout, config.memory_codec)
            with _named("memory_bytes"):
                memory = HostMemory(
                    memory_format,
                    config.memory_bytes,
                    policy(),
                    lambda keys: removals.of(MEMORY, keys),
                )
            tiers[MEMORY] = memory
            stack.push_async_callback(memory.close)
        disk = None
        if config.disk is not None:
            with _named("disk_codec"):
                disk_format = FrameFormat(layout, config.disk_codec)
            with _named("disk_bytes"):
                disk = DiskTier(
                    config.disk,
                    disk_format,
                    config.disk_bytes,
                    policy,
                    lambda keys: removals.of(DISK, keys),
                )
            tiers[DISK] = disk
            stack.push_async_callback(disk.close)
        if config.mooncake is not None:
            with _named("mooncake_codec"):
                mooncake_format = FrameFormat(layout, config.mooncake_codec)
            with _named("mooncake"):
                tiers[MOONCAKE] = mooncake = MooncakeTier(config.mooncake, mooncake_format, namespace)
            stack.push_async_callback(mooncake.close)
        if not config.index:
            yield OpenStore(config, namespace, layout.nbytes, PrefixStore(tiers), None, None)
            return
        if not config.name:
            raise ValueError("name is empty, expected one of this engine's own in the index")
        with _named("index"):
            index = await stack.enter_async_context(open_index(config.index, namespace))
        instance = secrets.token_hex(_INSTANCE_BYTES)
        owners = removals.owners = Owners(index, config.name, config.address if config.secret else "", instance)
        stack.push_async_callback(owners.close)
        if MEMORY in tiers:
            owners.register_memory(tiers[MEMORY])
        if disk is not None:
            await owners.register_disk(disk)
        peers = server = None
        if config.secret:
            client = PeerClient(config.peers_secret)
            peers = PeerReader(index, client, _formats(layout, config), owners.is_own)
            stack.push_async_callback(peers.close)
            # Peers read Mooncake's blocks from Mooncake.
            own = [tier for name, tier in tiers.items() if name != MOONCAKE]
            server = BlockServer(own, config.peers_secret, instance)
        store = PrefixStore(tiers, owners, peers)
        yield OpenStore(config, namespace, layout.nbytes, store, server, index)


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Adds the field of the configuration to an error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _formats(layout: BlockLayout, config: StoreConfig) -> list[FrameFormat]:
    """The formats that this engine reads from peers: exact and its own lossy."""
    lossy = config.lossy_codec
    return [FrameFormat(layout, codec) for codec in (PLAIN, *([lossy] if lossy else []))]
