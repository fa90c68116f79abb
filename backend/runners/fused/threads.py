"""How the compute threads wait for each other."""

from __future__ import annotations

import os

# A thread that waits at a barrier first spins, by default for milliseconds. When another process takes one of the
# cores, the spinning thread keeps the other from the thread it waits for, and a step becomes several times slower.
# A thousand rounds are some microseconds, longer than the threads wait for each other on free cores.
_SPIN_ROUNDS = "1000"


def limit_spinning() -> None:
    """Sets OpenMP's spinning unless the user did; only has an effect before torch, which brings OpenMP, is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_ROUNDS)
