"""A thread that calls Mooncake."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from prefix_store.tiers.counts import TierCounts
from prefix_store.tiers.faults import Faults
from prefix_store.tiers.halt import Halt
from prefix_store.tiers.worker import Worker

T = TypeVar("T")


class Caller:
    """Does one kind of work in a thread of its own; where the store fails, that is counted and said once."""

    def __init__(self, doing: str, counts: TierCounts) -> None:
        self._worker = Worker(f"kv-mooncake-{doing}")
        self._faults = Faults(f"{doing} KV blocks in Mooncake", counts.faults)

    async def run(self, work: Callable[[Halt], T], otherwise: T, halt: Halt | None = None) -> T:
        """What the work returns, or `otherwise` where it raises OSError. As `Worker.run` in all else."""

        def tried(own: Halt) -> T:
            try:
                result = work(own)
            except OSError as error:
                self._faults.failed(error)
                return otherwise
            self._faults.worked()
            return result

        return await self._worker.run(tried, halt)

    async def close(self) -> None:
        """As `Worker.close`."""
        await self._worker.close()
