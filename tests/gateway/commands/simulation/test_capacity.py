"""The capacity model against the simulation."""

import dataclasses
import random

import pytest

from gateway.commands.simulation.capacity import PLANNED, Workload, needed, utilisations, work_of
from gateway.commands.simulation.figures import Figures, Fleet
from gateway.commands.simulation.run import Kind, Options
from tests.gateway.commands.simulation.traces import Question, poisson, simulated

CLOSE = 0.05
"""The model is within so much of the simulated share."""


def popular(number: int, chance: random.Random) -> tuple[int, int, int]:
    """Some 400 questions, of which few are asked often."""
    return int(400 * chance.random() ** 3) + 1, chance.randrange(500, 6000), chance.randrange(1, 400)


def distinct(number: int, chance: random.Random) -> tuple[int, int, int]:
    return number + 1, chance.randrange(500, 6000), chance.randrange(1, 400)


# Slower than they are, so that a few thousand requests load them.
SLOW = Figures(gateway_hit=2e-3, gateway_redis_hit=6e-3, redis_memory_hit=2e-3, redis_hit=5e-3, redis_miss=20e-3)


@pytest.mark.parametrize(
    ("question", "fleet", "options", "rate"),
    [
        (distinct, Fleet(gateways=2, workers=2, redis=2, backends=12), Options(), 20.0),
        (distinct, Fleet(gateways=1, workers=1, redis=1, backends=4), Options(streamed=0.0), 6.0),
        (distinct, Fleet(gateways=3, workers=1, redis=1, backends=10), Options(similar=0.3), 20.0),
        (popular, Fleet(gateways=4, workers=1, redis=1, backends=6, memory_entries=50), Options(), 60.0),
        (popular, Fleet(gateways=2, workers=1, redis=0, backends=6, memory_entries=200), Options(), 40.0),
    ],
    ids=["misses", "whole answers", "semantic", "hits", "memory alone"],
)
def test_it_says_how_busy_nodes_are(question: Question, fleet: Fleet, options: Options, rate: float) -> None:
    """Each kind of node, within 5 % of what the queues of the simulation show."""
    result = simulated(poisson(rate, 400.0, question), fleet, SLOW, options)
    computed = utilisations(result.rate, Workload.of(result, options.streamed), SLOW, fleet)
    assert computed.keys() == result.loads.keys()
    assert max(load.mean for load in result.loads.values()) > 0.2  # there is something to compare
    for kind, load in result.loads.items():
        assert computed[kind] == pytest.approx(load.mean, rel=CLOSE, abs=0.002), kind


def test_what_it_asks_for_is_enough() -> None:
    """A fleet of the size that it names works as much of its time as was planned, and no more."""
    requests = poisson(20.0, 400.0, distinct)
    result = simulated(requests, Fleet(gateways=2, redis=1, backends=40), SLOW)
    need = needed(result.rate, Workload.of(result, 1.0), SLOW)
    fleet = Fleet(gateways=need.gateway_cores, redis=need.redis, backends=need.backends)
    loads = simulated(requests, fleet, SLOW).loads
    counts: dict[Kind, int] = {"gateway": need.gateway_cores, "redis": need.redis, "backend": need.backends}
    for kind, count in counts.items():
        mean = loads[kind].mean
        assert mean <= PLANNED * 1.02
        assert mean * count / max(1, count - 1) >= PLANNED * 0.98 or count == 1  # one fewer would not do


def test_ten_times_the_rate_needs_ten_times_as_much() -> None:
    """Of nodes and of the network, to a node."""
    workload = Workload(0.3, 0.1, 0.0, 0.0, 0.6, False, 2000.0, 300.0, 300.0, 1500.0, 1.0)
    one, ten = (needed(rate, workload, Figures()) for rate in (1e4, 1e5))
    assert ten.gateway_cores == pytest.approx(10 * one.gateway_cores, abs=10)
    assert ten.backends == pytest.approx(10 * one.backends, abs=10)
    assert ten.client_bits == pytest.approx(10 * one.client_bits)


def test_hits_cost_what_hits_take() -> None:
    """With hits alone no backend is needed, and Redis only for totals."""
    workload = Workload(1.0, 0.0, 0.0, 0.0, 0.0, False, 2000.0, 300.0, 0.0, 0.0, 1.0)
    figures = Figures()
    assert work_of(workload, figures).gateway == figures.gateway_hit
    need = needed(1000.0, workload, figures)
    assert (need.backends, need.redis_bits) == (0, 0)
    # Answers leave the gateway all the same.
    assert need.client_bits == 8 * 1000 * (2000 * figures.prompt_bytes + 300 * figures.chunk_bytes)


def test_streams_cost_cpu() -> None:
    """Each chunk of a miss is relayed and recorded."""
    workload = Workload(0.0, 0.0, 0.0, 0.0, 1.0, False, 100.0, 300.0, 300.0, 100.0, 1.0)
    figures = Figures()
    streamed, whole = (work_of(dataclasses.replace(workload, streamed=share), figures).gateway for share in (1.0, 0.0))
    assert streamed - whole == pytest.approx(300 * figures.gateway_chunk)
