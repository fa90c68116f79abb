"""Fetch or recompute: which blocks of a chain are had from where, and which are computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prefix_store.store.location import Location, PeerRun
from prefix_store.store.transfer_time import TransferTime

PEERS = "peers"
_PROBE_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Leg:
    """Blocks from where the last leg ended up to number ``until``, from one place."""

    place: str
    until: int
    run: PeerRun | None = None
    """Where another engine has them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided about blocks that a place has."""

    place: str
    blocks: int
    fetched: bool


@dataclass(frozen=True, slots=True)
class Route:
    """Legs in order, each beginning where the last one ended; what is beyond them is computed."""

    legs: tuple[Leg, ...]
    choices: tuple[Choice, ...]

    @property
    def until(self) -> int:
        """Up to which block something is fetched; 0: nothing is."""
        return self.legs[-1].until if self.legs else 0


def route(
    first: int,
    location: Location,
    times: Mapping[str, TransferTime],
    block_seconds: float | None,
    now: float,
    without: Iterable[str] = (),
) -> Route:
    """The way to the blocks from number ``first`` on that are sooner fetched than computed.

    Of a place of which too little is known all is fetched. One that was too slow is asked for a few blocks again when
    that is a while ago.

    Args:
        times: of every place.
        block_seconds: what computing a block takes; None: not known, so whatever is there is fetched.
        now: seconds of the clock of ``times``.
        without: places that are not to be asked.
    """
    legs: list[Leg] = []
    choices: list[Choice] = []
    done = first
    candidates = [Leg(place, lead) for place, lead in location.leads.items()]
    candidates += [Leg(PEERS, run.until, run) for run in location.peers]
    for leg in candidates:
        blocks = leg.until - done
        if blocks <= 0 or leg.place in without or (leg.run is not None and leg.run.first > done):
            continue
        if _pays(times[leg.place], blocks, block_seconds):
            taken = blocks
        else:
            taken = min(blocks, _PROBE_BLOCKS) if times[leg.place].is_stale(now) else 0
        if taken:
            done += taken
            legs.append(Leg(leg.place, done, leg.run))
            choices.append(Choice(leg.place, taken, fetched=True))
        if taken < blocks:
            choices.append(Choice(leg.place, blocks - taken, fetched=False))
    return Route(tuple(legs), tuple(choices))


def _pays(time: TransferTime, blocks: int, block_seconds: float | None) -> bool:
    seconds = time.estimate(blocks) if time.is_known else None
    return seconds is None or block_seconds is None or seconds < blocks * block_seconds
