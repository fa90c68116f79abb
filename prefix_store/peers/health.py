"""The health of a peer: how often it has failed, and until when it is skipped."""

from __future__ import annotations

import time
from dataclasses import dataclass

from prefix_store.peers.errors import PeerFailed, PeerInvalid, PeerRestarted

_SHORTEST, _LONGEST = 1.0, 60.0
_FOREVER = float("inf")


@dataclass(slots=True)
class PeerHealth:
    """Of one peer in one epoch. After a failure it is skipped for a second, after each further one twice as long.

    After a false reply it is skipped for a minute; after a restart for good, since it has a new epoch then.
    """

    failures: int = 0
    """Consecutive failures."""
    skipped_until: float = 0.0

    def is_available(self) -> bool:
        """Whether it may be called now."""
        return time.monotonic() >= self.skipped_until

    def succeeded(self) -> None:
        """Records a success."""
        self.failures = 0

    def failed(self, error: PeerFailed) -> None:
        """Records a failure."""
        self.failures += 1
        match error:
            case PeerRestarted():
                pause = _FOREVER
            case PeerInvalid():
                pause = _LONGEST
            case _:
                pause = min(_SHORTEST * 2.0 ** (self.failures - 1), _LONGEST)
        self.skipped_until = time.monotonic() + pause
