"""Where a test keeps KV blocks beyond an engine's memory: it answers when and as far as it likes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backend.engine.engine import Engine
from backend.engine.kv_connector import LoadRequest, SaveRequest, StoredPrefix
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.sequence import Sequence
from prefix_store.eviction.access import Access
from prefix_store.store.chain import Chain
from prefix_store.store.location import Location
from prefix_store.tiers.cancellation import Cancelled


@dataclass
class Shelf:
    """A ``KvConnector``: what it is asked for waits until ``turn`` comes to it.

    Args:
        chance: whether, when and how much.
        loss: what is fetched has so many of its lowest bits cleared, and is said to be lossy.
        reliable: all is done at the next turn, and as far as possible.
    """

    chance: random.Random
    loss: int = 0
    reliable: bool = False
    exact: dict[bytes, bytes] = field(default_factory=dict)
    """Bytes of blocks by their keys, as they were handed over: what the model computes."""
    spoilt: dict[bytes, bytes] = field(default_factory=dict)
    """Those that follow something that was restored with a loss."""
    fetched: int = 0
    halted: int = 0
    engine: Engine | None = None
    _fetches: list[LoadRequest] = field(default_factory=list)
    _keeps: list[SaveRequest] = field(default_factory=list)

    @property
    def is_waited_for(self) -> bool:
        """Whether blocks are held for it."""
        return bool(self._keeps)

    @property
    def is_empty(self) -> bool:
        """Whether no fetch and no save waits for it."""
        return not self._fetches and not self._keeps

    def ask(self, sequence: Sequence) -> None:
        """Tells a sequence how much of it could be had, before it is queued."""
        keys = sequence.keys.keys_of(np.asarray(sequence.tokens, np.int32))
        chain = Chain(bytes(16), sequence.keys.root, BLOCK_SIZE)
        chain.extend(keys, sequence.tokens[: len(keys) * BLOCK_SIZE])
        lead = next((place for place, key in enumerate(keys) if key not in self.exact), len(keys))
        blocks_to_load = lead if self.reliable else self.chance.randint(0, len(keys))
        kept = lead if self.reliable else self.chance.randint(0, lead)
        sequence.prefix = StoredPrefix(chain, Location({}), Access(0.0), blocks_to_load=blocks_to_load, kept=kept)

    def fetch(self, fetch: LoadRequest) -> None:
        """See ``KvConnector.fetch``."""
        assert fetch.blocks
        self._fetches.append(fetch)

    def keep(self, keep: SaveRequest) -> None:
        """See ``KvConnector.keep``."""
        assert len(keep.keys) == len(keep.blocks) == len(keep.tokens) // BLOCK_SIZE > 0
        self._keeps.append(keep)

    def turn(self) -> None:
        """Does some of what it was asked for."""
        for fetch in self._some(self._fetches):
            self._fill(fetch)
        for keep in self._some(self._keeps):
            self._take(keep)

    def finish(self) -> None:
        """Does all that is left."""
        was_reliable, self.reliable = self.reliable, True
        while not self.is_empty:
            self.turn()
        self.reliable = was_reliable

    def _some(self, waiting: list) -> list:  # type: ignore[type-arg] # of either kind
        now = [one for one in waiting if self.reliable or self.chance.random() < 0.4]
        for one in now:
            waiting.remove(one)
        return now

    def _fill(self, fetch: LoadRequest) -> None:
        assert self.engine is not None
        keys = [block.key for block in fetch.prefix.chain.blocks[fetch.first :]]
        most = len(fetch.blocks) if self.reliable else self.chance.randint(0, len(fetch.blocks))
        count = 0
        try:
            for key, (segment,) in zip(keys[:most], fetch.incoming.segments, strict=False):
                if key not in self.exact:
                    break
                target = np.asarray(segment)
                data = np.frombuffer(self.exact[key], target.dtype).reshape(target.shape)
                with fetch.cancel:
                    np.copyto(target, self._spoil(data))
                count += 1
        except Cancelled:
            self.halted += 1
        self.fetched += count
        self.engine.fetched(fetch, count, fetch.first if self.loss and count else None)

    def _spoil(self, data: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        bits = data.view(np.uint16)
        spoilt: npt.NDArray[np.generic] = (bits >> self.loss << self.loss).view(data.dtype)
        return spoilt

    def _take(self, keep: SaveRequest) -> None:
        assert self.engine is not None
        into = self.exact if keep.exact else self.spoilt
        for key, (segment,) in zip(keep.keys, keep.outgoing.ready(), strict=True):
            content = np.ascontiguousarray(segment).tobytes()
            if not keep.cancel.is_set:
                assert into.setdefault(key, content) == content or not keep.exact, "one key, one content"
        self.engine.kept(keep)
