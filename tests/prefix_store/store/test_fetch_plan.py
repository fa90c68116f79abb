"""Fetch or recompute: plans for the blocks of a chain."""

import itertools
import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from prefix_store.index.owner import Details, Owner
from prefix_store.store.fetch_plan import PEERS, FetchDecision, FetchStep, plan_fetch
from prefix_store.store.location import Location, PeerRun
from prefix_store.store.transfer_time import TransferTime
from tests.prefix_store.tiers.blocks import format_of

_NOW = 1_000.0
_OWNER = Owner("engine-7", 7, Details("http://127.0.0.1:1", "one"))
_PLACES = ("memory", "disk", PEERS)


def measured(each: float, ago: float = 0.0) -> TransferTime:
    """The time of a place with `each` seconds per block."""
    time = TransferTime()
    for _ in range(3):
        time.note(100, 100 * each, _NOW - ago)
    return time


def run(first: int, until: int) -> PeerRun:
    return PeerRun((_OWNER,), format_of(), first, until)


def unknown() -> dict[str, TransferTime]:
    return {place: TransferTime() for place in _PLACES}


@dataclass
class Case:
    """Arguments of `plan_fetch`."""

    first: int
    location: Location
    times: dict[str, TransferTime]
    block_seconds: float | None
    without: frozenset[str]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    counts = st.integers(0, 60)
    runs = []
    edge = 0
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(edge, edge + 10))
        edge = draw(st.integers(begin + 1, begin + 20))
        runs.append(run(begin, edge))
    times = {}
    for place in _PLACES:
        known = draw(st.booleans())
        times[place] = measured(draw(st.floats(1e-4, 1.0)), draw(st.floats(0.0, 60.0))) if known else TransferTime()
    return Case(
        draw(counts),
        Location({"memory": draw(counts), "disk": draw(counts)}, tuple(runs)),
        times,
        draw(st.none() | st.floats(1e-4, 1.0)),
        draw(st.frozensets(st.sampled_from(_PLACES))),
    )


@given(cases())
def test_every_leg_begins_where_the_one_before_ended_at_a_place_that_has_its_blocks(case: Case) -> None:
    """Skipped places are not used."""
    done = case.first
    for step in plan_fetch(case.first, case.location, case.times, case.block_seconds, _NOW, case.without).steps:
        assert step.until > done
        assert step.place not in case.without
        if step.run is None:
            assert step.until <= case.location.leading[step.place]
        else:
            assert step.place == PEERS
            assert step.run.first <= done
            assert step.until <= step.run.until
        done = step.until


@given(cases())
def test_nothing_is_fetched_that_is_expected_to_be_computed_sooner(case: Case) -> None:
    """Only a few blocks of a place without recent measurements are."""
    done = case.first
    for step in plan_fetch(case.first, case.location, case.times, case.block_seconds, _NOW, case.without).steps:
        time, blocks = case.times[step.place], step.until - done
        estimate = time.estimate(blocks)
        if estimate is not None and case.block_seconds is not None and estimate >= blocks * case.block_seconds:
            assert blocks <= 8
            assert time.is_stale(_NOW)
        done = step.until


@given(cases())
def test_what_is_chosen_is_what_is_fetched(case: Case) -> None:
    """The fetched choices are the steps, block by block."""
    way = plan_fetch(case.first, case.location, case.times, case.block_seconds, _NOW, case.without)
    ends = [case.first, *(step.until for step in way.steps)]
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]

    assert [(choice.place, choice.blocks) for choice in way.choices if choice.fetched] == [
        (step.place, blocks) for step, blocks in zip(way.steps, lengths, strict=True)
    ]
    assert all(choice.blocks > 0 for choice in way.choices)
    assert way.until == (way.steps[-1].until if way.steps else 0)


@given(cases(), st.randoms())
def test_asking_again_after_what_failed_comes_to_an_end(case: Case, choose: random.Random) -> None:
    """Planning ends if places give fewer blocks than they had, within the located blocks."""
    done, failed, asked = case.first, set(case.without), 0
    while steps := plan_fetch(done, case.location, case.times, case.block_seconds, _NOW, failed).steps:
        got = choose.randint(done, steps[0].until)
        if got < steps[0].until:
            failed.add(steps[0].place)
        done = got
        asked += 1
        assert done <= case.location.blocks
        assert asked <= case.location.blocks + len(_PLACES)


def test_where_nothing_is_known_everything_is_fetched() -> None:
    """Blocks are fetched from the first place that has them."""
    location = Location({"memory": 5, "disk": 9}, (run(0, 7), run(7, 20)))

    steps = plan_fetch(2, location, unknown(), 0.001, _NOW).steps

    assert steps == (FetchStep("memory", 5), FetchStep("disk", 9), FetchStep(PEERS, 20, run(7, 20)))


def test_without_a_rate_of_computing_everything_is_fetched() -> None:
    """Also from a slow place."""
    times = {place: measured(100.0) for place in _PLACES}

    assert plan_fetch(0, Location({"memory": 0, "disk": 30}), times, None, _NOW).until == 30


def test_a_slow_place_is_left_out_and_the_next_one_gives_what_it_would_have_given() -> None:
    """Blocks of the slow place that another one has are fetched from there."""
    times = unknown() | {"memory": measured(1.0), "disk": measured(0.001)}
    location = Location({"memory": 10, "disk": 6})

    way = plan_fetch(0, location, times, 0.01, _NOW)

    assert way.steps == (FetchStep("disk", 6),)
    assert way.choices == (FetchDecision("memory", 10, fetched=False), FetchDecision("disk", 6, fetched=True))


def test_a_slow_place_is_asked_for_eight_blocks_after_a_while() -> None:
    """The probe shows if it has become faster."""
    times = unknown() | {"disk": measured(1.0, ago=21.0)}

    way = plan_fetch(3, Location({"memory": 0, "disk": 40}), times, 0.01, _NOW)

    assert way.steps == (FetchStep("disk", 11),)
    assert way.choices == (FetchDecision("disk", 8, fetched=True), FetchDecision("disk", 29, fetched=False))


def test_a_run_of_a_peer_behind_a_gap_is_of_no_use() -> None:
    """Its earlier blocks are missing, so it is not used."""
    assert plan_fetch(0, Location({"memory": 4}, (run(5, 9),)), unknown(), None, _NOW).until == 4
    assert plan_fetch(0, Location({"memory": 5}, (run(5, 9),)), unknown(), None, _NOW).until == 9


def test_there_is_no_way_to_what_nobody_has() -> None:
    """The plan is empty, also for blocks that are there already."""
    assert plan_fetch(0, Location({}), unknown(), None, _NOW).steps == ()
    assert plan_fetch(9, Location({"memory": 9}), unknown(), None, _NOW).steps == ()
