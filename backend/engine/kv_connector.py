"""The connector between the engine and the prefix store: fetches and stores KV blocks outside the engine's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from prefix_store.tiers.cancellation import CancelToken
from telemetry.tracing.span import NO_SPAN, Span

if TYPE_CHECKING:
    from backend.engine.kv_blocks import Incoming, Outgoing
    from prefix_store.eviction.access import Access
    from prefix_store.store.chain import Chain
    from prefix_store.store.location import Location


@dataclass(slots=True, eq=False)
class StoredPrefix:
    """The blocks of a sequence's prefix that the prefix store has. Numbers count blocks.

    The engine reads the numbers; the rest belongs to the connector, on its event loop.
    """

    chain: Chain
    location: Location
    access: Access
    blocks_to_load: int = 0
    """Blocks that take less time to fetch than to compute, as of the request's arrival."""
    kept: int = 0
    """Blocks that are stored or being stored."""
    restored: int = 0
    """Blocks found in the engine or fetched, if any were fetched."""
    lossy: bool = False
    """Whether some of them were stored by a lossy codec."""
    span: Span = NO_SPAN
    """Of the request, for the trace of what is done with these blocks."""


@dataclass(slots=True, eq=False)
class LoadRequest:
    """Blocks of a sequence that are fetched while other sequences compute."""

    sequence_id: int
    prefix: StoredPrefix
    first: int
    """Position of the first of them in the sequence."""
    blocks: list[int]
    incoming: Incoming
    cancel: CancelToken = field(default_factory=CancelToken)
    """Set by the engine when it needs the memory."""


@dataclass(slots=True, eq=False)
class SaveRequest:
    """Blocks of a sequence to be stored. The engine does not change them until `Engine.kept` is called."""

    prefix: StoredPrefix
    first: int
    """Position of the first of them in the sequence."""
    tokens: list[int]
    """The tokens of the blocks."""
    keys: list[bytes]
    """Exact keys of the blocks."""
    blocks: list[int]
    outgoing: Outgoing
    exact: bool
    """Whether they are exactly what the model computes; False if an earlier block was restored with a loss."""
    cancel: CancelToken = field(default_factory=CancelToken)
    """Set by the engine when they are not to be stored after all."""


class KvConnector(Protocol):
    """Called by the engine's thread; no method may block."""

    def fetch(self, fetch: LoadRequest) -> None:
        """Fills blocks, and always reports through ``Engine.fetched`` how many were filled."""
        ...

    def keep(self, keep: SaveRequest) -> None:
        """Stores blocks, and always reports through ``Engine.kept`` that they are no longer read."""
        ...
