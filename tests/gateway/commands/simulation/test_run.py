"""The queues of the simulation: against theory, layer by layer, and when nodes die."""

import dataclasses
import math
import random

import pytest

from gateway.commands.simulation.figures import Figures, Fleet
from gateway.commands.simulation.run import Death, Options
from gateway.routing.strategies.load import LeastConnections
from tests.gateway.commands.simulation.traces import at, poisson, simulated

ONE = Fleet(gateways=1, workers=1, redis=1, backends=1)


def one_question(number: int, chance: random.Random) -> tuple[int, int, int]:
    return 1, 512, 1


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_a_queue_is_as_long_as_theory_says(utilisation: float) -> None:
    """Hits of constant time at random moments wait as in M/D/1: (Pollaczek and Khinchine) u * s / (2 * (1 - u))."""
    figures = Figures(gateway_hit=0.01)
    requests = poisson(utilisation / figures.gateway_hit, 2000.0, one_question)
    load = simulated(requests, ONE, figures, Options(warm_up=0.1)).loads["gateway"]
    assert load.mean == pytest.approx(utilisation, rel=0.02)
    assert load.wait == pytest.approx(utilisation * figures.gateway_hit / (2 * (1 - utilisation)), rel=0.1)


def test_a_question_that_comes_again_is_answered_from_memory() -> None:
    """Of the same worker, in the CPU time of a hit."""
    result = simulated(at(0.0, 10.0), ONE)
    assert (result.layers["miss"], result.layers["memory"]) == (0.5, 0.5)
    assert result.hit[1] == pytest.approx(Figures().gateway_hit)


def test_another_worker_finds_the_answer_in_redis() -> None:
    """And without Redis not at all: each of four computes it once."""
    four = Fleet(gateways=2, workers=2, redis=1, backends=1)
    times = [10.0 * number for number in range(60)]
    result = simulated(at(*times), four)
    assert [round(60 * result.layers[layer]) for layer in ("miss", "redis", "memory")] == [1, 3, 56]
    result = simulated(at(*times), dataclasses.replace(four, redis=0))
    assert [round(60 * result.layers[layer]) for layer in ("miss", "redis", "memory")] == [4, 0, 56]
    assert "redis" not in result.loads


def test_a_small_memory_leaves_answers_to_redis() -> None:
    """Two questions in turn, in a worker that holds one answer."""
    requests = sorted(at(0.0, 20.0, 40.0) + at(10.0, 30.0, 50.0, identity=2))
    result = simulated(requests, dataclasses.replace(ONE, memory_entries=1))
    assert [round(6 * result.layers[layer]) for layer in ("miss", "redis", "memory")] == [2, 4, 0]


def test_questions_under_way_share_a_call() -> None:
    """Who comes while the answer is computed gets it when it is there."""
    result = simulated(at(0.0, 0.1, 0.15), ONE)
    assert (round(3 * result.layers["miss"]), round(3 * result.layers["flight"])) == (1, 2)


def test_the_semantic_cache_answers_its_share() -> None:
    """Of what the exact cache misses, and its process works for each of these."""
    requests = poisson(20.0, 100.0, lambda number, chance: (number + 1, 512, 1))
    figures = Figures(prefill_speed=1e6)
    result = simulated(requests, ONE, figures, Options(similar=0.3, warm_up=0.0))
    assert result.layers["semantic"] == pytest.approx(0.3, abs=0.03)
    assert result.loads["semantic"].mean == pytest.approx(result.rate * figures.semantic_lookup, rel=0.02)


def test_more_load_than_a_backend_computes_is_named() -> None:
    """A backend that is asked for twice what it can do works all the time, and requests wait for it."""
    requests = poisson(4.0, 300.0, lambda number, chance: (number + 1, 6000, 10))
    result = simulated(requests, ONE)
    assert result.bottleneck == "backend"
    assert result.loads["backend"].most == pytest.approx(1.0, abs=0.02)
    assert result.first_byte[1] > 60


def test_slots_limit_a_backend_too() -> None:
    """Four answers of 10 s at a time: those who come then wait until one has ended."""
    requests = [request for number in range(8) for request in at(0.0, identity=number + 1, prompt=1, answer=500)]
    result = simulated([*requests, *at(30.0, identity=100)], ONE, Figures(slots=4))
    assert result.first_byte[0] < 0.1
    assert result.first_byte[1] == pytest.approx(10.0, rel=0.05)


def test_the_same_load_gives_the_same_result() -> None:
    """Chance is seeded."""
    requests = poisson(5.0, 60.0, lambda number, chance: (chance.randrange(100), 2000, 20))
    fleet = Fleet(gateways=3, redis=2, backends=2)
    assert simulated(requests, fleet) == simulated(requests, fleet)


def test_streams_of_a_backend_that_dies_are_cut() -> None:
    """What has begun to be streamed fails, whatever else is under way is asked for elsewhere, and later ones too."""
    requests = at(0.0) + at(0.01, identity=2, prompt=120_000, answer=10) + at(5.0, 6.0, identity=3)
    figures = Figures(token=0.2)
    two = dataclasses.replace(ONE, backends=2)
    streams = simulated(requests, two, figures, Options(warm_up=0.0), Death("backend", 0, 1.0))
    assert streams.failed == {"a stream that its backend has broken off": 1}
    whole = simulated(requests, two, figures, Options(streamed=0.0, warm_up=0.0), Death("backend", 0, 1.0))
    assert (whole.failed, whole.retried) == ({}, 1)
    prompts = simulated(requests, two, figures, Options(warm_up=0.0), Death("backend", 1, 1.0))
    assert (prompts.failed, prompts.retried) == ({}, 1)


def test_without_a_backend_only_hits_are_answered() -> None:
    """From memory and from Redis."""
    requests = at(0.0, 20.0, 30.0) + at(31.0, identity=2)
    result = simulated(requests, ONE, Figures(), Options(warm_up=0.0), Death("backend", 0, 10.0))
    assert result.failed == {"no backend is left": 1}
    assert result.layers["memory"] == 0.5


def test_a_redis_node_that_dies_costs_its_answers_and_one_deadline() -> None:
    """Its questions are misses of workers that do not have them in memory; other nodes' answers are still found."""
    questions = range(1, 41)
    small = Fleet(gateways=1, workers=1, redis=4, backends=1, memory_entries=1)
    first = [request for number in questions for request in at(float(number), identity=number)]
    again = [request for number in questions for request in at(100.0 + number, identity=number)]
    # A prompt whose blocks are there is not answered sooner, and a node that is there takes next to no time.
    figures = Figures(prefill_speed=1e9, redis_hit=1e-6, redis_worker=0.0)
    alive = simulated(first + again, small, figures)
    assert alive.layers["redis"] == 0.5
    result = simulated(first + again, small, figures, Options(warm_up=0.0), Death("redis", 0, 90.0))
    lost = round(80 * (0.5 - result.layers["redis"]))
    assert lost == pytest.approx(10, abs=5)
    assert result.failed == {}
    before, after = result.phases
    assert after.hits == pytest.approx(1 - lost / 40)
    assert (before.hits, before.start, before.end, after.requests) == (0.0, 0.0, 90.0, 40)
    waited = result.total[1] - alive.total[1]
    assert waited == pytest.approx(figures.redis_deadline, rel=0.1)


def test_a_gateway_that_dies_loses_what_is_under_way_and_what_comes_until_that_is_noticed() -> None:
    """Then others answer everything."""
    two = Fleet(gateways=2, redis=1, backends=1)
    requests = poisson(10.0, 100.0, lambda number, chance: (number + 1, 512, 50))
    figures = Figures(noticed_after=5.0)
    result = simulated(requests, two, figures, Options(warm_up=0.0), Death("gateway", 1, 50.0))
    assert result.failed["sent to a gateway that has died"] == pytest.approx(10 * 5 / 2, abs=12)
    assert result.failed["under way in a gateway that has died"] == pytest.approx(10 * 1.1 / 2, abs=5)
    assert sum(result.failed.values()) < 50
    assert sum(result.layers.values()) == pytest.approx(1 - sum(result.failed.values()) / result.requests)


def test_nothing_dies_that_is_not_there() -> None:
    """And there are requests."""
    with pytest.raises(ValueError, match="there is no redis 1: there are 1, from 0 on"):
        simulated(at(0.0), ONE, Figures(), Options(), Death("redis", 1, 1.0))
    with pytest.raises(ValueError, match="there are no requests"):
        simulated([], ONE)


def test_a_single_request_is_answered() -> None:
    """At the time 0, of which no share can be left out."""
    result = simulated(at(0.0), ONE, options=Options())
    assert math.isfinite(result.rate)
    assert LeastConnections().order([], None) == []  # type: ignore[arg-type]
