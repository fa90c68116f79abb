"""What the two sides of a connector tell each other: plain data that can be pickled.

A block is named by a `BlockId` whose namespace is empty and whose keys are of tokens and salts alone. Each worker makes
its own of it (`PartNames`), for what its part of the model makes of the tokens.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import xxhash

from prefix_store.frames.block_id import BlockId

NO_NAMESPACE = bytes(16)


class PartNames:
    """How one worker names its part of each block: workers with other namespaces have no key in common.

    Args:
        namespace: digest of the fingerprint of its part, 16 bytes.
    """

    def __init__(self, namespace: bytes) -> None:
        self._namespace = self._epoch = namespace

    def of(self, block: BlockId) -> BlockId:
        """The block as this worker stores it."""
        key, parent = (xxhash.xxh3_128_digest(self._epoch + part) for part in (block.key, block.parent))
        return BlockId(self._namespace, key, parent, block.tokens)

    @property
    def epoch(self) -> bytes:
        """Changes with the names."""
        return self._epoch

    def start_epoch(self) -> None:
        """Blocks have other names from now on: what is stored is never found again, here or after a restart."""
        self._epoch = secrets.token_bytes(len(self._namespace))


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where are a request's blocks? They are its chain from the first one on, and replace what was known of it."""

    request_id: str
    number: int
    """Of all look-ups: an answer to an earlier one of the request, before it was preempted, is void."""
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a look-up, in leading blocks."""

    number: int = 0
    """Of the look-up."""

    until: int = 0
    """To be loaded up to here; the rest is computed sooner."""
    kept: int = 0
    """Need not be stored again."""
    workers: int = 1
    """How many have answered."""

    def and_of(self, other: Found) -> Found:
        """What both have: a block counts only where all workers have their parts. Of two look-ups, the later one."""
        if self.number != other.number:
            return max(self, other, key=lambda found: found.number)
        until, kept = min(self.until, other.until), min(self.kept, other.kept)
        return Found(self.number, until, kept, self.workers + other.workers)


@dataclass(frozen=True, slots=True)
class Load:
    """Loads blocks of a chain, from number ``first`` on, into an engine's blocks."""

    request_id: str
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Stores blocks of a chain, from number ``first`` on. They stay as they are until that is reported as done."""

    request_id: str
    blocks: tuple[BlockId, ...]
    """Those that the worker does not know yet, after those it knows."""
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """Compares computed blocks of a chain, from number ``first`` on, with what is stored of them."""

    request_id: str
    first: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class StepPlan:
    """For the workers, with one step of the engine."""

    lookups: list[Lookup] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    audits: list[Audit] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks are about to be overwritten."""
    aborted: list[str] = field(default_factory=list)
    """Requests that need what is being loaded no longer."""
    ended: dict[str, tuple[bool, int]] = field(default_factory=dict)
    """Requests that are over: whether the end of their saves is to be reported, and tokens of the answer."""
    is_idle: bool = False
    """Whether the step computes nothing."""
    block_seconds: float | None = None
    """What computing a block takes; None: not known yet."""
    starts_epoch: bool = False
    """Whether all that was stored until now is void."""
    step: int = 0
    """Its number."""
    lookup_address: bytes = b""
    """The scheduler's socket, while it has no connection of a worker."""


@dataclass(slots=True)
class StepReport:
    """From the workers, with the step's end."""

    found: dict[str, Found] = field(default_factory=dict)
    step: int = 0
    """Of the plan."""

    def and_of(self, other: StepReport) -> StepReport:
        """The reports of two workers as one."""
        found = dict(self.found)
        for request_id, answer in other.found.items():
            found[request_id] = found[request_id].and_of(answer) if request_id in found else answer
        return StepReport(found, max(self.step, other.step))
