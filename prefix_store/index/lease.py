"""Leases: an owner keeps leased blocks while a reader fetches them."""

import asyncio
import secrets
from collections.abc import Sequence
from types import TracebackType

from prefix_store.errors import IndexUnavailable
from prefix_store.index.connection import IndexConnection
from prefix_store.index.layout import joined, packed_epoch
from prefix_store.index.owner import Owner

_ID_BYTES = 8
LONGEST_SECONDS = 60.0
_DEADLINE = 1.0


class Lease:
    """A reader's hold on leading blocks of an owner, until it is released or its time is over.

    It ends at its deadline without a release, so a killed reader holds no blocks.
    It is no guarantee: an owner that cannot reach Redis removes leased blocks. All blocks that were read must be
    verified, above all those read after the deadline.

        async with await index.lease(holder.owner, keys, seconds=5) as lease:
            ... read keys[: lease.blocks] ...
    """

    def __init__(self, connection: IndexConnection, owner: Owner, keys: Sequence[bytes]) -> None:
        self._connection = connection
        self._owner = owner
        self._keys = keys
        self._id = secrets.token_bytes(_ID_BYTES)
        self._deadline = 0.0
        self.blocks = 0
        """How many leading keys are leased; 0 if Redis is unavailable or the owner has none of them."""

    @property
    def seconds_left(self) -> float:
        """0 when it is over. Measured from before the request, so the owner never ends it earlier."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time()) if self.blocks else 0.0

    async def renew(self, seconds: float, deadline: float = _DEADLINE) -> int:
        """Leases the blocks for `seconds` from now on; returns how many. Raises only ValueError."""
        if not 0 < seconds <= LONGEST_SECONDS:
            raise ValueError(f"seconds is {seconds:g}, expected more than 0 and at most {LONGEST_SECONDS:g}")
        begun = asyncio.get_running_loop().time()
        epoch, keys = packed_epoch(self._owner.epoch), joined(self._keys)
        try:
            self.blocks = await self._connection.ask(
                "lease", epoch, self._id, round(seconds * 1000), keys, deadline=deadline
            )
        except IndexUnavailable:
            return 0
        self._deadline = begun + seconds
        return self.blocks

    async def release(self, deadline: float = _DEADLINE) -> None:
        """Ends the lease. After the deadline this does nothing. Never raises."""
        leased, self.blocks = self.blocks, 0
        if not leased:
            return
        try:
            await self._connection.ask("release", packed_epoch(self._owner.epoch), self._id, deadline=deadline)
        except IndexUnavailable:
            return  # it ends by itself

    async def __aenter__(self) -> "Lease":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.release()
