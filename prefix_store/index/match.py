"""The result of a look-up: which blocks are held by which owners."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prefix_store.index.layout import held
from prefix_store.index.owner import Owner


class Holder(NamedTuple):
    """An owner of the blocks of a run, with their tier (`TierKind`) and the codec's number (0 to 15)."""

    owner: Owner
    tier: int
    codec: int


class Run(NamedTuple):
    """Consecutive blocks, at least one, all of which each of the holders has."""

    blocks: int
    holders: tuple[Holder, ...]


class Match(NamedTuple):
    """The longest prefix of which every block has a live holder, in order."""

    runs: tuple[Run, ...] = ()

    @property
    def blocks(self) -> int:
        return sum(run.blocks for run in self.runs)


NO_MATCH = Match()


def match_of(reply: Sequence[int | bytes], owners: Mapping[int, Owner]) -> Match:
    """The match in a reply of match.lua, for these known owners.

    An owner that has just started is not known yet, so its blocks cannot be fetched: the match ends at the first block
    that only such owners have.
    """
    runs: list[Run] = []
    for blocks, claims in zip(reply[::2], reply[1::2], strict=True):
        assert isinstance(blocks, int) and isinstance(claims, bytes)  # noqa: PT018, S101
        holders = tuple(Holder(owners[epoch], tier, codec) for epoch, tier, codec in held(claims) if epoch in owners)
        if not holders:
            break
        if runs and runs[-1].holders == holders:
            runs[-1] = Run(runs[-1].blocks + blocks, holders)
        else:
            runs.append(Run(blocks, holders))
    return Match(tuple(runs))
