"""An owner of this process: its claims of blocks, and the epoch under which they are valid."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prefix_store.errors import IndexUnavailable
from prefix_store.index.connection import IndexConnection
from prefix_store.index.layout import check_keys, packed_epoch
from prefix_store.index.owner import Details, TierKind, packed_details
from prefix_store.index.writes import BLOCKS_AT_ONCE, Write, WriteKind, WriteQueue

log = logging.getLogger(__name__)

_INSTANCE_BYTES = 8
_NEW = b"new"
FORGET_SECONDS = 7 * 86_400


class CodecInventory(NamedTuple):
    """Blocks that an owner holds in one codec, parents before children."""

    codec: int
    keys: Sequence[bytes]


class LocalOwner:
    """Claims the blocks that this process, or its disk, holds. Made by `RedisIndex.own`.

    It has an epoch after its first announcement. With every new epoch, also after the index has lost its claims, and
    again before claims expire, it claims everything that `inventory` returns; callers repeat nothing. `inventory` is
    called on the event loop and must not block.

    `lasting` is for owners that outlive processes, such as a host's disk under its identity: such an owner keeps its
    epoch over restarts, and the processes of a host announce it together. Any other owner gets a new epoch with every
    start, so that claims of an ended process are not valid for its successor of the same name.
    """

    def __init__(
        self,
        name: str,
        tier: TierKind,
        inventory: Callable[[], Iterable[CodecInventory]],
        details: Callable[[], Details],
        lasting: bool,
        connection: IndexConnection,
        writes: WriteQueue,
        wake: Callable[[], None],
    ) -> None:
        if not name:
            raise ValueError("an owner's name is empty; give each engine process and each disk one of its own")
        self.name = name
        self.tier = tier
        self.epoch: int | None = None
        self._inventory = inventory
        self._details = details
        self._lasting = lasting
        self._connection = connection
        self._writes = writes
        self._wake = wake
        self._instance = secrets.token_bytes(_INSTANCE_BYTES)
        # How often all claims became doubtful, and up to which of these times a new epoch has replaced them.
        self._doubts = self._settled = 0
        self._was_unknown = False
        self._is_silent = False
        self._announcing = asyncio.Lock()
        self._claiming = asyncio.Lock()
        self._withdrawn: set[bytes] = set()  # since the inventory that is being claimed was made
        self._must_claim = asyncio.Event()

    def publish(self, keys: Sequence[bytes], codec: int = 0) -> None:
        """Claims these blocks; parents before children."""
        if not 0 <= codec <= 15:
            raise ValueError(f"codec is {codec}, expected a number from 0 to 15")
        self._withdrawn.difference_update(keys)
        self._say("publish", keys, codec)

    def touch(self, keys: Sequence[bytes]) -> None:
        """These blocks were used."""
        self._say("touch", keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        """These blocks are removed; children before parents."""
        if self._claiming.locked():
            self._withdrawn.update(keys)
        self._say("withdraw", keys)

    def start_new_epoch(self) -> None:
        """Invalidates all claims by a new epoch, and claims the present inventory."""
        self._doubts += 1
        self._wake()

    async def announce(self, lifetime: float, deadline: float) -> None:
        """Announces the owner; raises IndexUnavailable."""
        async with self._announcing:
            if not self._is_silent:
                await self._announce(lifetime, deadline)

    async def claim_inventory(self, every: float) -> None:
        """Claims everything with each new epoch and every `every` seconds; runs while the owner exists."""
        while True:
            try:
                async with asyncio.timeout(every):
                    await self._must_claim.wait()
            except TimeoutError:
                if self.epoch is None:
                    continue
            self._must_claim.clear()
            await self.claim_now()

    async def claim_now(self) -> None:
        """Queues a claim of everything in `inventory`."""
        async with self._claiming:
            self._withdrawn.clear()
            for codec, keys in self._inventory():
                for piece in _pieces(tuple(keys)):
                    await self._writes.has_room()
                    # Blocks that were withdrawn since the inventory was made must not be claimed.
                    if still := tuple(key for key in piece if key not in self._withdrawn):
                        self._say("publish", still, codec)
                    await asyncio.sleep(0)

    async def retire(self, deadline: float) -> None:
        """Ends the owner and its claims. Those of a lasting one stay until they expire."""
        async with self._announcing:  # a concurrent announcement would restore it
            self._is_silent = True
            epoch, self.epoch = self.epoch, None
            if epoch is None or self._lasting:
                return
            try:
                await self._connection.ask("retire", self.name.encode(), packed_epoch(epoch), deadline=deadline)
            except IndexUnavailable as error:
                log.warning("redis did not hear that %s has gone: %s", self.name, error)

    async def _announce(self, lifetime: float, deadline: float) -> None:
        given = b"" if self.epoch is None else packed_epoch(self.epoch)
        doubts = self._doubts
        if doubts > self._settled:
            given = _NEW
        reply: bytes = await self._connection.probe(
            "announce",
            *(self.name.encode(), given, self._instance, int(self._lasting)),
            *(round(lifetime * 1000), FORGET_SECONDS * 1000, packed_details(self._details())),
            deadline=deadline,
        )
        if not reply:
            self._is_silent = True
            self.epoch = None
            log.error("another process announces itself as %r: give each engine a name of its own", self.name)
            return
        if given == _NEW:  # a `start_new_epoch` during the call is for the next one
            self._settled = doubts
        epoch = int.from_bytes(reply, "big")
        if epoch != self.epoch or self._was_unknown:
            self.epoch = epoch
            self._was_unknown = False
            self._must_claim.set()

    def _say(self, kind: WriteKind, keys: Sequence[bytes], codec: int = 0) -> None:
        if self.epoch is None:  # no claim is valid yet, and the first one covers the whole inventory
            return
        for piece in _pieces(keys):
            self._writes.add(Write(kind, self, piece, self.tier, codec, unknown=self._is_unknown))

    def _is_unknown(self, epoch: int) -> None:
        if epoch == self.epoch:  # Redis has lost the owner, and maybe claims
            self._was_unknown = True
            self._wake()


def _pieces(keys: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    check_keys(keys)
    rest = iter(keys)
    while piece := tuple(itertools.islice(rest, BLOCKS_AT_ONCE)):
        yield piece
