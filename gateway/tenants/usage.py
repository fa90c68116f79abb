"""What one process knows of a limited key: what it has leased, slots, and what Redis has yet to hear."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakSet

import msgspec

from gateway.tenants.local_share import LocalShare
from gateway.tenants.scope import DAY, MONTH, REQUESTS, SLOTS, Refusal, Scope, scopes_of
from gateway.tenants.virtual_key import VirtualKey

SLOT_SECONDS = 15.0
"""A slot that its worker does not renew for so long is free, and so is money that is reserved."""
RENEWED_AFTER = 5.0
LEASE_SECONDS = 1.0
# Permits for hits are leased in parts of a thousandth of the limit, so that not every hit asks Redis.
_PARTS = 1000
MOST_MISSES = 32
"""The most that a lease may have. Each has twice as many as the last, while that was used up in time."""
# Slots to free that are kept: older ones have expired, or will.
_MOST_FREED = 1_000


@dataclass(slots=True, eq=False, weakref_slot=True)
class ReservedMoney:
    """What a request may cost, until that is known. `text` is how the scripts have it."""

    text: str
    renewed_at: float
    """When it is to be renewed, in monotonic seconds."""


class Batch(msgspec.Struct):
    """Input of settle.lua. Seconds are those of Redis' replies, money is in nano-dollars."""

    tokens: list[tuple[int, int, int]] = []
    """Second, reserved, used."""
    money: list[tuple[str, int]] = []
    """Reserved, used."""
    unreserved: int = 0
    """Used without a reservation: a sum, since during an outage there may be many answers."""
    held: list[str] = []
    """Reserved, for requests that still run."""
    permits: list[tuple[int, int]] = []
    """Second, unused."""
    freed: list[str] = []
    renewed: list[str] = []


class Lease:
    """Misses that Redis has admitted for this process, for a second: `left` more, each with up to `tokens` and `money`,
    which is in nano-dollars.

    `used` has of each scope the requests, the tokens, and the money of day and month that are used or reserved.
    """

    __slots__ = ("_day", "_name", "granted", "left", "money", "second", "tokens", "until", "used")

    def __init__(self, name: str, tokens: int, money: int, reply: list[int]) -> None:
        """`reply` is that of admit.lua; `name` is that of its slots, without their numbers."""
        _, self.second, self._day, self.granted, *self.used = reply
        self.left = self.granted
        self._name = name
        self.tokens = tokens
        self.money = money
        self.until = time.monotonic() + LEASE_SECONDS

    def take(self) -> tuple[str, str]:
        """A miss: its slot, and its money as the scripts have it."""
        slot = f"{self._name}.{self.left}"
        self.left -= 1
        return slot, f"{slot} {self._day} {self.money}"


class AdmittedMiss(NamedTuple):
    """One of a lease. `money` is None where none is reserved."""

    lease: Lease
    slot: str
    money: ReservedMoney | None


@dataclass(slots=True)
class Usage:
    """The use of one key by this process. `chunk` is how many permits are leased at once, 0 without such a limit."""

    key: VirtualKey
    scopes: tuple[Scope, ...]
    chunk: int
    limits_requests_only: bool
    limits_slots: bool
    has_budget: bool
    last_used: float = 0.0
    permits: int = 0
    permits_second: int = 0
    permits_until: float = 0.0
    lease: Lease | None = None
    wanted: int = 1
    """How many misses the next lease is to have."""
    is_leasing: bool = False
    """Whether Redis is being asked for one."""
    refilling: asyncio.Lock = field(default_factory=asyncio.Lock)
    refused: Refusal | None = None
    refused_at: float = 0.0
    refused_until: float = 0.0
    slots: dict[str, float] = field(default_factory=dict)
    """When each is to be renewed, in monotonic seconds."""
    reserved: WeakSet[ReservedMoney] = field(default_factory=WeakSet)
    """Renewed for as long as their requests, which hold them, run: a client that left may have left one running."""
    batch: Batch = field(default_factory=Batch)
    spent: list[tuple[int, int]] = field(default_factory=list)
    """What Redis last said was spent of each scope by day and month."""
    shares: tuple[LocalShare, ...] = ()
    """Of the outage, or of the last one."""
    is_away: bool = False
    """Whether Redis is away, as the last request for the key found."""

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

    def free(self, slots: Iterable[str]) -> None:
        """Tell Redis that they are free."""
        self.batch.freed += slots
        del self.batch.freed[:-_MOST_FREED]

    def take_miss(self, tokens: int, money: int) -> AdmittedMiss | None:
        """A miss of the lease; None if it has none for so many tokens and so much money."""
        lease = self.lease
        if lease is None or not lease.left or tokens > lease.tokens or money > lease.money:
            return None
        return None if time.monotonic() >= lease.until else self.take_from(lease)

    def take_from(self, lease: Lease) -> AdmittedMiss:
        """A miss of a lease that has some left."""
        now = time.monotonic()
        slot, text = lease.take()
        if self.limits_slots:
            self.slots[slot] = now + RENEWED_AFTER
        if not (lease.money and self.has_budget):
            return AdmittedMiss(lease, slot, None)
        reserved = ReservedMoney(text, now + RENEWED_AFTER)
        self.reserved.add(reserved)
        return AdmittedMiss(lease, slot, reserved)

    def end_lease(self) -> bool:
        """Give unused misses back to Redis; False if there are none. After one that was not used up in time the next
        lease is for as many as were used.
        """
        lease, self.lease = self.lease, None
        if lease is None:
            return False
        if lease.left or time.monotonic() >= lease.until:
            self.wanted = max(1, lease.granted - lease.left)
        if not lease.left:
            return False
        self.batch.permits.append((lease.second, lease.left))
        self.batch.tokens.append((lease.second, lease.left * lease.tokens, 0))
        while lease.left:
            slot, text = lease.take()
            self.batch.freed.append(slot)
            if lease.money:
                self.batch.money.append((text, 0))
        return True

    def renew(self, now: float) -> bool:
        """Renew the slots and the money of long requests; False if there are none."""
        due = [slot for slot, at in self.slots.items() if at <= now]
        for slot in due:
            self.slots[slot] = now + RENEWED_AFTER
        self.batch.renewed += due
        held = [money for money in self.reserved if money.renewed_at <= now]
        for money in held:
            money.renewed_at = now + RENEWED_AFTER
            self.batch.held.append(money.text)
        return bool(due or held)

    def remembered(self, now: float) -> Refusal | None:
        """A refusal that cannot have changed, with what is left to wait."""
        if self.refused is None or now >= self.refused_until:
            return None
        waited = now - self.refused_at
        return Refusal(self.refused.scope, self.refused.which, self.refused.wait - waited, self.refused.used)

    def local_shares(self) -> Iterator[tuple[Scope, LocalShare, tuple[int, int]]]:
        """Each scope with this worker's share, and what was spent of it before Redis went away."""
        if not self.is_away:
            self.is_away = True
            self.shares = tuple(map(LocalShare, self.shares or (None,) * len(self.scopes)))
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
        has_budget=any(scope.limit(which) >= 0 for scope in scopes for which in (DAY, MONTH)),
        last_used=time.monotonic(),
    )
