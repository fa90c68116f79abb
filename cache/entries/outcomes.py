"""The four outcomes of a lookup. A failure never looks like a miss."""

from dataclasses import dataclass
from typing import Literal

from cache.entries.entry import Entry

Tier = Literal["memory", "redis"]


@dataclass(frozen=True, slots=True)
class Hit:
    """An entry that may answer the request; `age` in seconds, `stale` when older than its lifetime."""

    entry: Entry
    tier: Tier
    age: float
    stale: bool


@dataclass(frozen=True, slots=True)
class Miss:
    """Every tier answered, and none has the entry; `tiers` are those queried."""

    tiers: tuple[Tier, ...] = ("memory",)


@dataclass(frozen=True, slots=True)
class Bypass:
    """The cache was not used; `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A tier could not answer, so it is unknown whether the entry exists."""

    reason: str


Outcome = Hit | Miss | Bypass | Failed
