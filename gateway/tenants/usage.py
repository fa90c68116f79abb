"""What one process knows of a limited key: permits that it has leased, slots, and what Redis has yet to hear."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from gateway.tenants.local_share import LocalShare
from gateway.tenants.scope import REQUESTS, SLOTS, Refusal, Scope, scopes_of
from gateway.tenants.virtual_key import VirtualKey

SLOT_SECONDS = 15.0
"""A slot that its worker does not renew for so long is free."""
RENEWED_AFTER = 5.0
# Large limits are leased in parts of a thousandth, so that not every hit asks Redis; what is below asks for each.
_PARTS = 1000


class Batch(msgspec.Struct):
    """Input of settle.lua. Seconds and days are those of Redis' replies."""

    tokens: list[tuple[int, int, int]] = []
    """Second, reserved, used."""
    money: list[tuple[int, int, int]] = []
    """Day, reserved, used; in nano-dollars."""
    permits: list[tuple[int, int]] = []
    """Second, unused."""
    freed: list[str] = []
    renewed: list[str] = []

    def add_money(self, day: int, reserved: int, used: int) -> None:
        """Sums of a day: during an outage there may be many answers."""
        for number, (known, reserved_before, used_before) in enumerate(self.money):
            if known == day:
                self.money[number] = (day, reserved_before + reserved, used_before + used)
                return
        self.money.append((day, reserved, used))


@dataclass(slots=True)
class Usage:
    """The use of one key by this process. `chunk` is how many permits are leased at once, 0 without such a limit."""

    key: VirtualKey
    scopes: tuple[Scope, ...]
    chunk: int
    limits_requests_only: bool
    limits_slots: bool
    last_used: float = 0.0
    permits: int = 0
    permits_second: int = 0
    permits_until: float = 0.0
    refilling: asyncio.Lock = field(default_factory=asyncio.Lock)
    refused: Refusal | None = None
    refused_at: float = 0.0
    refused_until: float = 0.0
    slots: dict[str, float] = field(default_factory=dict)
    """When each is to be renewed, in monotonic seconds."""
    batch: Batch = field(default_factory=Batch)
    spent: list[tuple[int, int]] = field(default_factory=list)
    """What Redis last said was spent of each scope by day and month."""
    shares: tuple[LocalShare, ...] | None = None
    """While Redis is away."""

    def take_permit(self, now: float) -> bool:
        if not self.permits or now >= self.permits_until:
            return False
        self.permits -= 1
        return True

    def return_permits(self) -> bool:
        """Give unused permits back to Redis; False if there are none."""
        if not self.permits:
            return False
        self.batch.permits.append((self.permits_second, self.permits))
        self.permits = 0
        return True

    def renew_slots(self, now: float) -> bool:
        """Renew the slots of long requests; False if there are none."""
        due = [slot for slot, at in self.slots.items() if at <= now]
        for slot in due:
            self.slots[slot] = now + RENEWED_AFTER
        self.batch.renewed += due
        return bool(due)

    def remembered(self, now: float) -> Refusal | None:
        """A refusal that cannot have changed, with what is left to wait."""
        if self.refused is None or now >= self.refused_until:
            return None
        waited = now - self.refused_at
        return Refusal(self.refused.scope, self.refused.which, self.refused.wait - waited, self.refused.used)

    def local_shares(self) -> Iterator[tuple[Scope, LocalShare, tuple[int, int]]]:
        """Each scope with this worker's share, and what was spent of it before Redis went away."""
        if self.shares is None:
            self.shares = tuple(LocalShare() for _ in self.scopes)
        spent = self.spent or [(0, 0)] * len(self.scopes)
        return zip(self.scopes, self.shares, spent, strict=True)


def usage_of(key: VirtualKey) -> Usage:
    scopes = scopes_of(key)
    limits = [scope.limit(REQUESTS) for scope in scopes if scope.limit(REQUESTS) >= 0]
    return Usage(
        key,
        scopes,
        chunk=max(1, min(limits) // _PARTS) if limits else 0,
        limits_requests_only=all(number < 0 for scope in scopes for number in scope.numbers[REQUESTS:]),
        limits_slots=any(scope.limit(SLOTS) >= 0 for scope in scopes),
        last_used=time.monotonic(),
    )
