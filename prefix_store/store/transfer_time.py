"""The transfer time of a place, learned from its transfers."""

from __future__ import annotations

_DECAY = 0.9
_STALE_SECONDS = 20.0
_ENOUGH = 3


class TransferTime:
    """Seconds for n blocks, as a fixed part and a part per block: least squares over recent transfers.

    Each measurement counts .9 as much as the one after it, so ten are enough to learn that a place has become slow.
    """

    def __init__(self) -> None:
        self._weight = self._blocks = self._seconds = self._squares = self._products = 0.0
        self._measured_at = float("-inf")
        self._measurements = 0

    @property
    def is_known(self) -> bool:
        """Whether there are enough measurements: the first one includes connecting, imports and allocation."""
        return self._measurements >= _ENOUGH

    def note_late(self, blocks: int, seconds: float, now: float) -> None:
        """As ``note``, of a transfer that was ended as too slow; it suffices for ``is_known``."""
        self.note(blocks, seconds, now)
        self._measurements = max(self._measurements, _ENOUGH)

    def note(self, blocks: int, seconds: float, now: float) -> None:
        """Adds a transfer of at least one block; ``now`` in seconds of a monotonic clock."""
        self._measurements += 1
        self._weight = self._weight * _DECAY + 1.0
        self._blocks = self._blocks * _DECAY + blocks
        self._seconds = self._seconds * _DECAY + seconds
        self._squares = self._squares * _DECAY + blocks * blocks
        self._products = self._products * _DECAY + blocks * seconds
        self._measured_at = now

    def estimate(self, blocks: int) -> float | None:
        """Seconds for this many blocks; None: unknown."""
        if not self._weight:
            return None
        spread = self._squares - self._blocks * self._blocks / self._weight
        each = self._seconds / self._blocks
        if spread > 1e-3 * self._squares:
            slope = (self._products - self._blocks * self._seconds / self._weight) / spread
            # Neither part is negative, despite noise: the slope is limited to 0 and the mean.
            each = min(max(slope, 0.0), each)
        fixed = (self._seconds - each * self._blocks) / self._weight
        return fixed + each * blocks

    def is_stale(self, now: float) -> bool:
        """Whether the last measurement is so old that the place may have changed."""
        return now - self._measured_at > _STALE_SECONDS
