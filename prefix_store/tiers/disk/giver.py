"""The thread that reads for peers."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from prefix_store.frames.buffer import buffer
from prefix_store.frames.errors import BadFrame
from prefix_store.frames.frame import check_frame
from prefix_store.tiers.counts import TierCounts
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.discard import discard
from prefix_store.tiers.disk.membership import Membership
from prefix_store.tiers.faults import Faults

_MOST_FRAME_BYTES = 256 * 2**20


class Giver:
    """Reads frames by their stored keys, of whatever process and format. One thread uses it."""

    def __init__(self, path: Path, counts: TierCounts) -> None:
        self._counts = counts
        self._faults = Faults(f"reading KV blocks for peers from {path}", counts.faults)

    def give(self, membership: Membership, key: bytes, parent: bytes) -> bytes | None:
        """A verified frame, or None; who asks does not say whether it is the first of a chain."""
        for name in (BlockName(key, parent, False), BlockName(key, parent, True)):
            if membership.has(name):
                return self._read(membership, name)
        return None

    def _read(self, membership: Membership, name: BlockName) -> bytes | None:
        try:
            size = os.stat(membership.folder.block(name)).st_size
            frame = buffer(min(size, _MOST_FRAME_BYTES) + 1)
            data = frame[: membership.load(name, frame)]
            check_frame(data.data, name.key, name.parent)
            self._faults.worked()
            return data.tobytes()
        except FileNotFoundError:
            return None
        except BadFrame as error:
            with contextlib.suppress(OSError):
                discard(membership, name, error, self._counts.bad_frames)
        except OSError as error:
            self._faults.failed(error)
        return None
