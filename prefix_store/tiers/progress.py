"""How far a thread has come, for who looks at it before the thread has returned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """What is restored is counted while the halt of the work is held, so that is final once it is set (see `Halt`)."""

    done: int = 0
    """Blocks of a chain, from the first that was wanted on."""
