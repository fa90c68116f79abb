"""What becomes of a file that is not the frame that it should be."""

from __future__ import annotations

import logging
from collections import Counter

from prefix_store.frames.errors import BadFrame
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.membership import Membership

log = logging.getLogger(__name__)


def discard(membership: Membership, name: BlockName, error: BadFrame, bad_frames: Counter[str]) -> None:
    """Counts it, says so, and removes it, so that nobody is given it again. Raises OSError."""
    bad_frames[error.field] += 1
    log.error("removing %s: %s", membership.folder.block(name), error)
    membership.discard(name)
