"""Frames of KV blocks by their keys, for an engine that saves and fetches prefixes; the test calls the I/O thread's
part.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import numpy.typing as npt

from backend.engine.engine import Engine
from backend.engine.kv_connector import LoadRequest, SaveRequest, StoredPrefix
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.sequence import NO_TENANT, SamplingParams, Sequence
from backend.text.detokenizer import Detokenizer, TokenBytes
from prefix_store.eviction.access import Access
from prefix_store.frames.segments import gather, scatter
from prefix_store.store.chain import Chain
from prefix_store.store.location import Location
from prefix_store.tiers.cancellation import Cancelled


class KvShelf:
    """See ``KvConnector``."""

    def __init__(self) -> None:
        self.frames: dict[bytes, npt.NDArray[np.uint8]] = {}
        self.fetches: list[LoadRequest] = []
        self.keeps: list[SaveRequest] = []
        self.fetched = 0

    def fetch(self, fetch: LoadRequest) -> None:
        """See ``KvConnector.fetch``."""
        self.fetches.append(fetch)

    def keep(self, keep: SaveRequest) -> None:
        """See ``KvConnector.keep``."""
        self.keeps.append(keep)

    def put_away(self, engine: Engine) -> None:
        """Ends all saves."""
        for keep in self.keeps:
            for key, segments in zip(keep.keys, keep.outgoing.ready(), strict=True):
                self.frames[key] = np.empty(sum(np.asarray(segment).nbytes for segment in segments), np.uint8)
                gather(segments, self.frames[key])
            engine.kept(keep)
        self.keeps.clear()

    def bring(self, engine: Engine) -> None:
        """Ends all fetches."""
        for fetch in self.fetches:
            blocks = fetch.prefix.chain.blocks[fetch.first :]
            count = 0
            with suppress(Cancelled):
                for block, segments in zip(blocks, fetch.incoming.segments, strict=False):
                    with fetch.cancel:
                        scatter(self.frames[block.key], segments)
                    count += 1
            self.fetched += count
            engine.fetched(fetch, count, None)
        self.fetches.clear()

    def asking(self, number: int, tokens: list[int], params: SamplingParams, table: TokenBytes) -> Sequence:
        """A sequence whose prefix is fetched from here as far as its frames are here."""
        sequence = Sequence(number, tokens, params, Detokenizer(table), number)
        keys = NO_TENANT.keys_of(np.array(tokens, np.int32))
        chain = Chain(bytes(16), NO_TENANT.root, BLOCK_SIZE)
        chain.extend(keys, np.array(tokens[: len(keys) * BLOCK_SIZE]))
        here = next((place for place, key in enumerate(keys) if key not in self.frames), len(keys))
        sequence.prefix = StoredPrefix(chain, Location({}), Access(0.0), blocks_to_load=here, kept=here)
        return sequence
