"""What this process tells the index: which tiers it speaks for, and what comes and goes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prefix_store.index.index import RedisIndex
from prefix_store.index.local_owner import Held, LocalOwner
from prefix_store.index.owner import Details, TierKind
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.tier import Tier

MEMORY, DISK = "memory", "disk"


class Owners:
    """Speaks for the host memory of this process, and together with the host's other processes for their disk.

    Args:
        name: of this engine.
        address: URL under which other engines reach it; empty: they cannot.
        instance: as what it answers there; another one after each start.
    """

    def __init__(self, index: RedisIndex, name: str, address: str, instance: str) -> None:
        self.index = index
        self._name = name
        self._address = address
        self._instance = instance
        self._tiers: dict[str, Tier] = {}
        self._owners: dict[str, LocalOwner] = {}

    def is_own(self, name: str) -> bool:
        """Whether an owner is this process, or what it reads by itself."""
        return any(owner.name == name for owner in self._owners.values())

    def speak_for_memory(self, tier: Tier) -> None:
        """Announces what is in host memory, under this engine's name."""
        self._tiers[MEMORY] = tier
        self._owners[MEMORY] = self.index.own(
            self._name, TierKind.MEMORY, _inventory(tier), lambda: self._details(tier)
        )

    async def speak_for_disk(self, tier: DiskTier) -> None:
        """Announces what is on disk, under the identity of the folder; again where that has become another one."""
        self._tiers[DISK] = tier
        owner, identity = self._owners.get(DISK), tier.identity
        if owner is not None and owner.name == identity:
            return
        if owner is not None:
            del self._owners[DISK]
            await self.index.disown(owner)
        if identity is not None:
            self._owners[DISK] = self.index.own(
                identity, TierKind.DISK, _inventory(tier), lambda: self._details(tier), lasting=True
            )

    async def publish(self, tier_name: str, keys: Sequence[bytes]) -> None:
        """These blocks, by their stored keys, are in a tier now; parents before children."""
        tier = self._tiers.get(tier_name)
        if isinstance(tier, DiskTier):
            await self.speak_for_disk(tier)
        owner = self._owners.get(tier_name)
        if owner is not None and tier is not None:
            owner.publish(keys, tier.format.codec.number)

    def forget(self, tier_name: str, keys: Sequence[bytes]) -> None:
        """These are not there any more."""
        owner = self._owners.get(tier_name)
        if owner is not None:
            owner.forget(keys)

    def _details(self, tier: Tier) -> Details:
        return Details(self._address, self._instance, tier.blocks, tier.bytes)


def _inventory(tier: Tier) -> Callable[[], Iterable[Held]]:
    return lambda: [Held(tier.format.codec.number, tuple(tier.inventory()))]
