"""Fetch or recompute: the plan of which blocks of a chain are fetched from where, and which are computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prefix_store.store.location import Location, PeerRun
from prefix_store.store.transfer_time import TransferTime

PEERS = "peers"
_PROBE_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class FetchStep:
    """The blocks from the end of the previous step up to number ``until``, from one place."""

    place: str
    until: int
    run: PeerRun | None = None
    """The peers' run, if the place is peers."""


@dataclass(frozen=True, slots=True)
class FetchDecision:
    """The decision about the blocks of one place."""

    place: str
    blocks: int
    fetched: bool


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Steps in order; the blocks after the last one are computed."""

    steps: tuple[FetchStep, ...]
    choices: tuple[FetchDecision, ...]

    @property
    def until(self) -> int:
        """The end of the last step; 0 if nothing is fetched."""
        return self.steps[-1].until if self.steps else 0


def plan_fetch(
    first: int,
    location: Location,
    times: Mapping[str, TransferTime],
    block_seconds: float | None,
    now: float,
    without: Iterable[str] = (),
) -> FetchPlan:
    """Plan the fetches of the blocks from number ``first`` on that take less time than computing them.

    A place without measurements is fetched from. One that was too slow is probed again with a few blocks after a while.

    Args:
        times: of every place.
        block_seconds: time to compute a block; None if unknown: then everything is fetched.
        now: seconds of the clock of ``times``.
        without: places to skip.
    """
    steps: list[FetchStep] = []
    choices: list[FetchDecision] = []
    done = first
    candidates = [FetchStep(place, leading) for place, leading in location.leading.items()]
    candidates += [FetchStep(PEERS, run.until, run) for run in location.peers]
    for step in candidates:
        blocks = step.until - done
        if blocks <= 0 or step.place in without or (step.run is not None and step.run.first > done):
            continue
        if _is_faster_than_compute(times[step.place], blocks, block_seconds):
            taken = blocks
        else:
            taken = min(blocks, _PROBE_BLOCKS) if times[step.place].is_stale(now) else 0
        if taken:
            done += taken
            steps.append(FetchStep(step.place, done, step.run))
            choices.append(FetchDecision(step.place, taken, fetched=True))
        if taken < blocks:
            choices.append(FetchDecision(step.place, blocks - taken, fetched=False))
    return FetchPlan(tuple(steps), tuple(choices))


def _is_faster_than_compute(time: TransferTime, blocks: int, block_seconds: float | None) -> bool:
    seconds = time.estimate(blocks) if time.is_known else None
    return seconds is None or block_seconds is None or seconds < blocks * block_seconds
