"""What a place for blocks has done, for its operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

TAKEN_BACK = "the sources were taken back"
"""Why blocks were dropped whose memory was wanted for something else (see `Halt`)."""


@dataclass(slots=True)
class TierCounts:
    """Blocks unless the name says otherwise. Whoever does the work counts it; numbers only grow."""

    hits: int = 0
    """Restored."""
    misses: int = 0
    """Asked for and not restored, whatever the reason."""
    bytes_read: int = 0
    """Of frames that were restored."""
    read_seconds: float = 0.0
    """Spent on them: bytes / seconds is the live bandwidth."""
    writes: int = 0
    bytes_written: int = 0
    evicted: int = 0
    bad_frames: Counter[str] = field(default_factory=Counter)
    """Not what they should have been, by the field that gave them away; removed."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Offered and not kept, by reason."""
    faults: Counter[str] = field(default_factory=Counter)
    """Calls that the system or a peer failed, by what it said."""
