"""The thread that pins and removes blocks because somebody wants it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.frames.block_id import BlockId
from prefix_store.tiers.counts import TierCounts
from prefix_store.tiers.disk.block_name import BlockName, block_name
from prefix_store.tiers.disk.membership import Membership
from prefix_store.tiers.disk.restorer import lead_of
from prefix_store.tiers.faults import Faults

_PATIENCE = 2.0
_POLL_SECONDS = 0.01
_TRIES = 3


class Steward:
    """Says what is wanted in the folder, and waits until the keeper has heard it. One thread uses it.

    Without a keeper it waits for two seconds. What it says holds for the next one: until then nothing is evicted.

    Args:
        wait: lets the keeper work for so many seconds; False when there is nothing to wait for any more.
    """

    def __init__(
        self, path: Path, frame_format: FrameFormat, counts: TierCounts, wait: Callable[[float], bool]
    ) -> None:
        self._format = frame_format
        self._wait = wait
        self._faults = Faults(f"pinning and removing KV blocks in {path}", counts.faults)

    def pin(self, membership: Membership, chain: Sequence[BlockId]) -> int:
        """Has the leading blocks that are there stay; returns how many the keeper allows."""
        pinned = tries = 0
        try:
            while not pinned and tries < _TRIES and (count := lead_of(membership, self._format, chain)):
                tries += 1  # of what is there, something may go before the keeper hears of the pin
                pinned = self._pin(membership, chain[:count])
            self._faults.worked()
        except OSError as error:
            self._faults.failed(error)
            return 0
        return pinned

    def unpin(self, membership: Membership, chain: Sequence[BlockId]) -> int:
        """Takes back every pin at a block of the chain; returns how many blocks the longest of them kept."""
        names = [block_name(self._format, chain, place) for place in range(len(chain))]
        try:
            pinned = _last_pinned(membership, names)
            if pinned:
                membership.unpin(names)
                self._wait_until_heard(membership)
            self._faults.worked()
        except OSError as error:
            self._faults.failed(error)
            return 0
        return pinned

    def discard(self, membership: Membership, chain: Sequence[BlockId], keep: int) -> int:
        """Removes the blocks after the first `keep`, pinned or not; has the keeper remove what else follows them."""
        gone = 0
        try:
            count = lead_of(membership, self._format, chain)
            for place in reversed(range(keep, count)):
                membership.discard(block_name(self._format, chain, place), tells=place == keep)
                gone += 1
            if gone:
                self._wait_until_heard(membership)
            self._faults.worked()
        except OSError as error:
            self._faults.failed(error)
        return gone

    def clear(self, membership: Membership) -> int:
        """Removes every block of every process, and all pins; returns how many blocks it were."""
        gone = 0
        try:
            gone = membership.clear()
            self._wait_until_heard(membership)
            self._faults.worked()
        except OSError as error:
            self._faults.failed(error)
        return gone

    def _pin(self, membership: Membership, chain: Sequence[BlockId]) -> int:
        """How many blocks of a chain are pinned when the keeper has heard of it. Raises OSError."""
        names = [block_name(self._format, chain, place) for place in range(len(chain))]
        membership.pin(names[-1])
        self._wait_until_heard(membership)
        # The keeper takes back what it cannot keep, and says what it keeps instead.
        pinned = _last_pinned(membership, names)
        return pinned if pinned and membership.has(names[pinned - 1]) else 0

    def _wait_until_heard(self, membership: Membership) -> None:
        said = membership.said_so_far()
        deadline = time.monotonic() + _PATIENCE
        while not membership.is_heard(said) and time.monotonic() < deadline and self._wait(_POLL_SECONDS):
            pass


def _last_pinned(membership: Membership, names: Sequence[BlockName]) -> int:
    """How many leading blocks of a chain its own pins keep. Raises OSError."""
    pinned = set(membership.folder.pinned())
    return next((place for place in range(len(names), 0, -1) if names[place - 1] in pinned), 0)
