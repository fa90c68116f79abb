"""A store's state for operators, as JSON."""

from __future__ import annotations

from typing import Any

from prefix_store.store.fetch_plan import PEERS
from prefix_store.store.open_store import OpenStore
from prefix_store.tiers.counts import TierCounts


def describe_store(opened: OpenStore, block_size: int, block_seconds: float | None) -> dict[str, Any]:
    """What the tiers hold, what they have saved, and what was decided.

    Args:
        block_size: tokens in a block.
        block_seconds: what computing one takes; None: unknown.
    """
    store, config, index = opened.store, opened.config, opened.index
    figures = store.figures
    capacities = {"memory": config.memory_bytes, "disk": config.disk_bytes}
    tiers: dict[str, Any] = {
        name: {
            "codec": tier.format.codec.name,
            "blocks": tier.blocks,
            "bytes": tier.used_bytes,
            "capacity_bytes": capacities.get(name),
            "tokens_saved": figures.restored[name] * block_size,
            **_counts(tier.counts),
        }
        for name, tier in store.tiers.items()
    }
    if store.peers is not None:
        tiers[PEERS] = {"tokens_saved": figures.restored[PEERS] * block_size, **_counts(store.peers.counts)}
    return {
        "namespace": opened.namespace.hex(),
        "block_size": block_size,
        "block_bytes": opened.block_bytes,
        "tiers": tiers,
        "decisions": {
            "fetched_blocks": dict(figures.fetched),
            "computed_blocks": dict(figures.computed),
            "late_fetches": figures.late,
            "block_seconds": {
                "computed": block_seconds,
                **{name: time.estimate(1) for name, time in store.times.items()},
            },
        },
        "index": None
        if index is None
        else {
            "well": index.connection.is_available,
            "owners": [
                {"name": owner.name, "blocks": owner.details.blocks, "bytes": owner.details.size}
                for owner in index.owners.values()
            ],
            "failed_matches": index.failed_matches,
            "unsaid_blocks": index.dropped,
        },
        "blocks_given": None if opened.server is None else opened.server.frames,
    }


def _counts(counts: TierCounts) -> dict[str, Any]:
    return {
        "hits": counts.hits,
        "misses": counts.misses,
        "writes": counts.writes,
        "evictions": counts.evictions,
        "bytes_read": counts.bytes_read,
        "gigabytes_per_second": counts.bytes_read / counts.read_seconds / 1e9 if counts.read_seconds else None,
        "bad_frames": dict(counts.bad_frames),
        "rejected": dict(counts.rejected),
        "io_errors": dict(counts.io_errors),
    }
