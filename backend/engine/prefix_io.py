"""What the engine asks of those who keep KV blocks beyond its memory, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from prefix_store.tiers.halt import Halt

if TYPE_CHECKING:
    from backend.engine.kv_blocks import Incoming, Outgoing
    from prefix_store.eviction.access import Access
    from prefix_store.store.chain import Chain
    from prefix_store.store.location import Location


@dataclass(slots=True, eq=False)
class StoredPrefix:
    """What is known of a sequence's first blocks beyond the engine's memory. Numbers count blocks.

    The engine looks at the numbers; the rest is for who does its reading and writing, and on its event loop.
    """

    chain: Chain
    location: Location
    access: Access
    worth: int = 0
    """So many could be had from elsewhere sooner than they are computed, when the request came."""
    kept: int = 0
    """So many need not be kept any more: they are, or have been handed over."""
    restored: int = 0
    """So many were there or came from elsewhere, if any came from elsewhere."""
    lossy: bool = False
    """Whether some of them came back with a loss."""


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks of a sequence that are being filled from elsewhere, while others compute."""

    sequence_id: int
    prefix: StoredPrefix
    first: int
    """Which block of the sequence the first of them is."""
    blocks: list[int]
    incoming: Incoming
    halt: Halt = field(default_factory=Halt)
    """Set by the engine when it needs the memory for something else."""


@dataclass(slots=True, eq=False)
class Keep:
    """Blocks of a sequence to be kept elsewhere. The engine leaves them as they are until it is told that they are."""

    prefix: StoredPrefix
    first: int
    """Which block of the sequence the first of them is."""
    tokens: list[int]
    """Those in the blocks."""
    keys: list[bytes]
    """Exact keys of the blocks."""
    blocks: list[int]
    outgoing: Outgoing
    exact: bool
    """Whether they are what the model computes; else something before them was restored with a loss."""
    halt: Halt = field(default_factory=Halt)
    """Set by the engine when they are not to be kept after all."""


class PrefixIO(Protocol):
    """Called by the engine's thread; nothing here may wait."""

    def fetch(self, fetch: Fetch) -> None:
        """Fills blocks, and says through ``Engine.fetched`` how far that went; always."""
        ...

    def keep(self, keep: Keep) -> None:
        """Keeps blocks, and says through ``Engine.kept`` that they are not read any more; always."""
        ...
