"""Blocks of other engines: found through the index, read over HTTP."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.segments import Segments
from prefix_store.index.index import RedisIndex
from prefix_store.index.match import Holder
from prefix_store.index.owner import Owner
from prefix_store.peers.client import PeerClient
from prefix_store.peers.exchange import Address
from prefix_store.peers.protocol import MAX_BLOCKS
from prefix_store.store.location import PeerRun
from prefix_store.tiers.cancellation import CancelToken
from prefix_store.tiers.counts import TierCounts

_PEERS_SHARE = 0.9
_MAX_BYTES_AT_ONCE = 2**29
_MAX_OWNERS = 2


class PeerReader:
    """Finds and reads blocks of the engines that share this engine's index.

    Args:
        formats: the frame formats that can be decoded; an exact one comes first.
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
        self._turns = itertools.count()

    @property
    def counts(self) -> TierCounts:
        """Counts of reads from peers."""
        return self._client.counts

    async def find(self, chain: Sequence[BlockId]) -> tuple[PeerRun, ...]:
        """The runs of the chain that peers hold, in order; one round trip per format."""
        runs: list[PeerRun] = []
        for frame_format in self._formats:
            covered = runs[-1].until if runs else 0
            runs += [
                PeerRun(run.owners, frame_format, max(run.first, covered), run.until)
                for run in await self._runs(frame_format, chain)
                if run.until > covered
            ]
        return tuple(runs)

    async def read(
        self, run: PeerRun, wanted: Sequence[BlockId], into: Sequence[Segments], within: float, cancel: CancelToken
    ) -> int:
        """Restores blocks of a run from one of its owners, and the rest from the next; returns how many.

        Reports missing blocks to the index.

        Args:
            within: seconds.
        """
        deadline = time.monotonic() + within
        done = 0
        # Round robin, so that a run that all peers hold is not read from one of them.
        turn = next(self._turns) % len(run.owners)
        owners = (*run.owners[turn:], *run.owners[:turn])[:_MAX_OWNERS]
        for place, owner in enumerate(owners):
            if done < len(wanted):
                now = time.monotonic()
                until = now + (deadline - now) / (len(owners) - place)
                done += await self._read(owner, run.format, wanted[done:], into[done:], until, cancel)
        return done

    async def close(self) -> None:
        """Ends the connections."""
        await self._client.close()

    async def _read(
        self,
        owner: Owner,
        frame_format: FrameFormat,
        wanted: Sequence[BlockId],
        into: Sequence[Segments],
        deadline: float,
        cancel: CancelToken,
    ) -> int:
        """Restores blocks from one owner, as far as it has them, in as many requests as that takes."""
        at_once = max(1, min(MAX_BLOCKS, _MAX_BYTES_AT_ONCE // frame_format.frame_bytes))
        done = 0
        while done < len(wanted) and not cancel.is_set and (left := deadline - time.monotonic()) > 0:
            asked = wanted[done : done + at_once]
            got = await self._ask(owner, frame_format, asked, into[done : done + at_once], left, cancel)
            done += got
            if got < len(asked):
                break
        return done

    async def _ask(
        self,
        owner: Owner,
        frame_format: FrameFormat,
        wanted: Sequence[BlockId],
        into: Sequence[Segments],
        within: float,
        cancel: CancelToken,
    ) -> int:
        """One request, of no more blocks than a peer sends in one response."""
        peer = _address(owner)
        keys = [frame_format.stored_key(block.key) for block in wanted]
        if not self._client.may_ask(peer):
            return 0
        # Shorter than the restore's own deadline: a slow peer is then skipped for a while.
        restored = await self._client.read(peer, wanted, into, frame_format, _PEERS_SHARE * within, cancel)
        if restored:
            self._index.refresh_claims(owner, keys[:restored])
        if restored < len(keys) and not cancel.is_set and self._client.may_ask(peer):
            self._index.remove_claims(owner, keys[restored:])  # it answered completely, and has no more
        return restored

    async def _runs(self, frame_format: FrameFormat, chain: Sequence[BlockId]) -> list[PeerRun]:
        """The runs that peers hold in this format."""
        match = await self._index.match([frame_format.stored_key(block.key) for block in chain])
        runs: list[PeerRun] = []
        until = 0
        for run in match.runs:
            first, until = until, until + run.blocks
            owners = tuple(holder.owner for holder in run.holders if self._can_give(holder, frame_format))
            if not owners:  # this engine has them itself
                continue
            both = tuple(owner for owner in runs[-1].owners if owner in owners) if runs else ()
            if both and runs[-1].until == first:
                runs[-1] = PeerRun(both, frame_format, runs[-1].first, until)
            else:
                runs.append(PeerRun(owners, frame_format, first, until))
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
