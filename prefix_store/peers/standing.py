"""How a peer has behaved, and until when it is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prefix_store.peers.errors import PeerFailed, PeerLied, PeerRestarted

_SHORTEST, _LONGEST = 1.0, 60.0
_FOREVER = float("inf")


@dataclass(slots=True)
class Standing:
    """Of one peer in one epoch. After a failure it is left alone for a second, after each further one twice as long.

    One that lied is left alone for a minute at once; one that has restarted does not come back in its old epoch.
    """

    clock: Callable[[], float] = time.monotonic
    failures: int = 0
    """Since it last gave what it was asked for."""
    alone_until: float = 0.0

    def may_be_asked(self) -> bool:
        """Whether it is worth a question now."""
        return self.clock() >= self.alone_until

    def gave(self) -> None:
        """It did what it was asked for."""
        self.failures = 0

    def failed(self, error: PeerFailed) -> None:
        """It did not."""
        self.failures += 1
        match error:
            case PeerRestarted():
                pause = _FOREVER
            case PeerLied():
                pause = _LONGEST
            case _:
                pause = min(_SHORTEST * 2.0 ** (self.failures - 1), _LONGEST)
        self.alone_until = self.clock() + pause
