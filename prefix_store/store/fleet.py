"""Other engines' blocks: found through the index, had over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.segments import Segments
from prefix_store.index.index import RedisIndex
from prefix_store.index.match import Holder
from prefix_store.index.owner import Owner
from prefix_store.peers.client import PeerClient
from prefix_store.peers.exchange import Address
from prefix_store.store.location import PeerRun
from prefix_store.tiers.counts import TierCounts
from prefix_store.tiers.halt import Halt

_LEASE_SECONDS = 10.0


class Fleet:
    """The engines that share an index with this one.

    Args:
        formats: in which frames are understood; an exact one comes first.
        is_own: whether an owner of this name is read without the network.
    """

    def __init__(
        self,
        index: RedisIndex,
        client: PeerClient,
        formats: Sequence[FrameFormat],
        is_own: Callable[[str], bool],
    ) -> None:
        self._index = index
        self._client = client
        self._formats = tuple(formats)
        self._is_own = is_own

    @property
    def counts(self) -> TierCounts:
        """Of what was asked of others."""
        return self._client.counts

    async def find(self, chain: Sequence[BlockId]) -> tuple[PeerRun, ...]:
        """What others have of it, in order; one round trip for each format."""
        runs: list[PeerRun] = []
        for frame_format in self._formats:
            covered = runs[-1].until if runs else 0
            runs += [
                PeerRun(run.owner, frame_format, max(run.first, covered), run.until)
                for run in await self._runs(frame_format, chain)
                if run.until > covered
            ]
        return tuple(runs)

    async def read(
        self, run: PeerRun, wanted: Sequence[BlockId], into: Sequence[Segments], within: float, halt: Halt
    ) -> int:
        """Restores blocks of a run from its owner; returns how many. Tells the index what turned out not to be there.

        Args:
            within: seconds.
        """
        peer = _address(run.owner)
        keys = [run.format.stored_key(block.key) for block in wanted]
        if not self._client.may_ask(peer):
            return 0
        async with await self._index.lease(run.owner, keys, _LEASE_SECONDS):
            restored = await self._client.read(peer, wanted, into, run.format, within, halt)
        if restored:
            self._index.confirm(run.owner, keys[:restored])
        if restored < len(keys) and self._client.may_ask(peer):  # it is well, and has no more
            self._index.deny(run.owner, keys[restored:])
        return restored

    async def close(self) -> None:
        """Ends the connections."""
        await self._client.close()

    async def _runs(self, frame_format: FrameFormat, chain: Sequence[BlockId]) -> list[PeerRun]:
        """What others have in this format."""
        match = await self._index.match([frame_format.stored_key(block.key) for block in chain])
        runs: list[PeerRun] = []
        until = 0
        for run in match.runs:
            first, until = until, until + run.blocks
            owners = [holder.owner for holder in run.holders if self._can_give(holder, frame_format)]
            if not owners:  # this engine has them itself
                continue
            if runs and runs[-1].until == first and runs[-1].owner in owners:
                runs[-1] = PeerRun(runs[-1].owner, frame_format, runs[-1].first, until)
            else:
                runs.append(PeerRun(owners[0], frame_format, first, until))
        return runs

    def _can_give(self, holder: Holder, frame_format: FrameFormat) -> bool:
        owner = holder.owner
        return (
            holder.codec == frame_format.codec.number
            and not self._is_own(owner.name)
            and bool(owner.details.address)
            and self._client.may_ask(_address(owner))
        )


def _address(owner: Owner) -> Address:
    return Address(owner.details.address, owner.details.instance)
