"""Publishes to the index what the tiers of this process have and remove."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence

from prefix_store.index.index import RedisIndex
from prefix_store.index.local_owner import CodecInventory, LocalOwner
from prefix_store.index.owner import Details, TierKind
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.tier import Tier

MEMORY, DISK, MOONCAKE = "memory", "disk", "mooncake"


class Owners:
    """Announces this process's host memory, and together with the host's other processes their disk.

    Args:
        name: of this engine.
        address: URL under which other engines reach it; empty: they cannot.
        instance: identifies its server; another one after each start.
    """

    def __init__(self, index: RedisIndex, name: str, address: str, instance: str) -> None:
        self.index = index
        self._name = name
        self._address = address
        self._instance = instance
        self._tiers: dict[str, Tier] = {}
        self._owners: dict[str, LocalOwner] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def is_own(self, name: str) -> bool:
        """Whether an owner is a tier of this process."""
        return any(owner.name == name for owner in self._owners.values())

    def register_memory(self, tier: Tier) -> None:
        """Announces what is in host memory, under this engine's name."""
        self._tiers[MEMORY] = tier
        self._owners[MEMORY] = self.index.own(
            self._name, TierKind.MEMORY, _inventory(tier), lambda: self._details(tier)
        )

    async def register_disk(self, tier: DiskTier) -> None:
        """Announces what is on disk, under the identity of the folder; again if that has changed."""
        self._tiers[DISK] = tier
        owner, identity = self._owners.get(DISK), tier.identity
        if owner is not None and owner.name == identity:
            return
        # All of this before the first await: a concurrent call finds it done.
        self._owners.pop(DISK, None)
        if identity is not None:
            self._owners[DISK] = announced = self.index.own(
                identity, TierKind.DISK, _inventory(tier), lambda: self._details(tier), lasting=True
            )
            self._begin(_claim_when_listed(tier, announced))
        if owner is not None:
            await self.index.disown(owner)

    async def publish(self, tier_name: str, keys: Sequence[bytes]) -> None:
        """Publishes blocks of a tier by their stored keys; parents before children."""
        tier = self._tiers.get(tier_name)
        if isinstance(tier, DiskTier):
            await self.register_disk(tier)
        owner = self._owners.get(tier_name)
        if owner is not None and tier is not None:
            owner.publish(keys, tier.format.codec.number)

    def forget(self, tier_name: str, keys: Sequence[bytes]) -> None:
        """Withdraws removed blocks."""
        owner = self._owners.get(tier_name)
        if owner is not None:
            owner.forget(keys)

    async def close(self) -> None:
        """Ends the background tasks; nothing more is published."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _details(self, tier: Tier) -> Details:
        return Details(self._address, self._instance, tier.blocks or 0, tier.used_bytes or 0)


async def _claim_when_listed(tier: DiskTier, owner: LocalOwner) -> None:
    """Claims older blocks on disk after the first listing, which comes after an owner's first claim."""
    await tier.listed()
    await owner.claim_now()


def _inventory(tier: Tier) -> Callable[[], Iterable[CodecInventory]]:
    return lambda: [CodecInventory(tier.format.codec.number, tuple(tier.inventory()))]
