"""Where the first blocks of a chain are."""

from __future__ import annotations

from dataclasses import dataclass

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.index.owner import Owner


@dataclass(frozen=True, slots=True)
class PeerRun:
    """Blocks ``first`` to ``until`` (exclusive) of a chain, all of which each of the owners has, in one format."""

    owners: tuple[Owner, ...]
    format: FrameFormat
    first: int
    until: int


@dataclass(frozen=True, slots=True)
class Location:
    """The replies of all places to a look-up; at the read they may have fewer blocks."""

    leading: dict[str, int]
    """Leading blocks in each tier of this process, by the tier's name, the fastest first."""
    peers: tuple[PeerRun, ...] = ()
    """Of other engines, in order."""

    @property
    def blocks(self) -> int:
        """Leading blocks in any place."""
        return max([0, *self.leading.values(), *(run.until for run in self.peers)])

    @property
    def kept(self) -> int:
        """Leading blocks that are in every tier of this process."""
        return min(self.leading.values(), default=0)
