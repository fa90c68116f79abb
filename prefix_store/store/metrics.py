"""What a store reports to a metrics system."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prefix_store.store.fetch_plan import PEERS
from prefix_store.store.store import PrefixStore

_COUNTS = {
    "hits": "Blocks restored.",
    "misses": "Blocks asked for and not restored.",
    "writes": "Blocks written.",
    "evictions": "Blocks evicted.",
    "bytes_read": "Bytes of the frames of restored blocks.",
    "read_seconds": "Time spent reading frames.",
}
_SUMS = {
    "bad_frames": "Frames that failed a check and were removed.",
    "rejected": "Blocks offered to the tier and not stored.",
    "io_errors": "Calls to the system or to a peer that failed.",
}
"""Of ``TierCounts``."""


@dataclass(frozen=True, slots=True)
class StoreMetric:
    """One figure of each place."""

    name: str
    help: str
    values: Mapping[str, float]
    """By the place, the label ``tier``."""
    is_counter: bool = True


def store_metrics(store: PrefixStore, block_size: int) -> Iterator[StoreMetric]:
    """The figures of a store whose blocks have so many tokens."""
    figures, places = store.figures, (*store.tiers, PEERS)
    tokens = {place: figures.restored[place] * block_size for place in places}
    yield StoreMetric("restored_tokens", "Prompt tokens restored from beyond the engine's memory.", tokens)
    yield StoreMetric("fetched_blocks", "Blocks chosen to be fetched.", dict(figures.fetched))
    yield StoreMetric(
        "computed_blocks",
        "Blocks that were stored, but were computed again because that was faster.",
        dict(figures.computed),
    )
    blocks = {name: blocks for name, tier in store.tiers.items() if (blocks := tier.blocks) is not None}
    yield StoreMetric("blocks", "Blocks stored.", blocks, is_counter=False)
    sizes = {name: size for name, tier in store.tiers.items() if (size := tier.used_bytes) is not None}
    yield StoreMetric("bytes", "Bytes of the frames of stored blocks.", sizes, is_counter=False)
    counts = {name: tier.counts for name, tier in store.tiers.items()}
    if store.peers is not None:
        counts[PEERS] = store.peers.counts
    for name, help_text in _COUNTS.items():
        yield StoreMetric(name, help_text, {place: getattr(of, name) for place, of in counts.items()})
    for name, help_text in _SUMS.items():
        yield StoreMetric(name, help_text, {place: getattr(of, name).total() for place, of in counts.items()})
