"""What every strategy promises, and what each one does."""

from collections import Counter
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.prefixes.history import PrefixHistory
from gateway.routing.strategies.canary import Canary
from gateway.routing.strategies.load import LeastConnections, PowerOfTwo
from gateway.routing.strategies.model_aware import LoadedModels, ModelAware
from gateway.routing.strategies.prefix_aware import PrefixAware
from gateway.routing.strategies.registry import STRATEGIES, strategy_of
from gateway.routing.strategies.rotation import RoundRobin, Weighted
from gateway.routing.strategy import RouteRequest, Strategy
from gateway.settings.upstreams import ModelSettings, RoutingSettings
from gateway.settings.upstreams import Strategy as StrategyName
from gateway.upstreams.loaded import LoadedReport
from tests.gateway.routing.candidates import FakeCandidate, candidates

ASKED = RouteRequest("m")


def made(name: str, model: ModelSettings = ModelSettings()) -> Strategy:  # noqa: B008  # frozen
    return strategy_of(cast(StrategyName, name), RoutingSettings(), PrefixHistory(1000), LoadedModels(), model)


@pytest.mark.parametrize("name", STRATEGIES)
@given(
    loads=st.lists(st.tuples(st.floats(0.1, 100), st.integers(0, 50), st.floats(0, 10)), max_size=6),
    prompts=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=8),
    canary=st.sampled_from([{}, {"1": 0.3}, {"7": 1.0}]),
)
def test_an_order_has_each_candidate_once(
    name: str, loads: list[tuple[float, int, float]], prompts: list[list[int]], canary: dict[str, float]
) -> None:
    """Whatever has been sent before, each candidate is there exactly once."""
    known = [FakeCandidate(str(number), *load) for number, load in enumerate(loads)]
    strategy = made(name, ModelSettings(canary=canary))
    for prompt in prompts:
        request = RouteRequest("m", tuple(prompt), {"0": 0.5})
        ordered = strategy.order(known, request)
        assert sorted(candidate.name for candidate in ordered) == [candidate.name for candidate in known]
        for candidate in ordered[:1]:
            strategy.sent(candidate, request)


@pytest.mark.parametrize("name", STRATEGIES)
def test_weight_is_capacity(name: str) -> None:
    """Of many requests that are all under way, an upstream of three times the weight has about three times as many."""
    heavy, light = FakeCandidate("heavy", weight=3, latency=1), FakeCandidate("light", latency=1)
    strategy = made(name)
    for number in range(400):
        request = RouteRequest("m", (number,))
        chosen = strategy.order([light, heavy], request)[0]
        strategy.sent(chosen, request)
        chosen.in_flight += 1
    assert 2.5 < heavy.in_flight / light.in_flight < 3.5


def test_round_robin_gives_each_its_turn() -> None:
    """Four upstreams are first four times of sixteen, evenly."""
    strategy, known = RoundRobin(), candidates(4)
    first = [strategy.order(known, ASKED)[0].name for _ in range(16)]
    assert first == ["a", "b", "c", "d"] * 4


def test_round_robin_goes_on_when_an_upstream_leaves() -> None:
    """The turns of one that is away go to the others evenly, but for what they had before."""
    strategy, known = RoundRobin(), candidates(3)
    strategy.order(known, ASKED)
    first = Counter(strategy.order(known[:2], ASKED)[0].name for _ in range(10))
    assert set(first) == {"a", "b"}
    assert abs(first["a"] - first["b"]) <= 2


def test_weighted_turns_are_smooth() -> None:
    """Weights 3 and 1 give a turn of the lighter one within every four."""
    known = [FakeCandidate("a", weight=3), FakeCandidate("b")]
    strategy = Weighted()
    first = [strategy.order(known, ASKED)[0].name for _ in range(12)]
    assert all(Counter(first[at : at + 4]) == {"a": 3, "b": 1} for at in range(0, 12, 4))
    assert "aaaa" not in "".join(first)


def test_least_connections_breaks_ties_by_turns() -> None:
    """Idle upstreams share requests evenly, and a busy one gets none."""
    known = candidates(3)
    known[1].in_flight = 1
    strategy = LeastConnections()
    first = Counter(strategy.order(known, ASKED)[0].name for _ in range(20))
    assert set(first) == {"a", "c"}
    assert abs(first["a"] - first["c"]) <= 7  # b takes turns of its own, which go on to c


def test_power_of_two_takes_the_better_of_two() -> None:
    """The slowest of all is never first, the fastest about half of the time."""
    known = candidates(4)
    for number, candidate in enumerate(known):
        candidate.latency = number + 1.0
    strategy = PowerOfTwo(seed=1)
    first = Counter(strategy.order(known, ASKED)[0].name for _ in range(2000))
    assert first["d"] == 0
    assert 0.45 < first["a"] / 2000 < 0.55


def test_prefix_aware_follows_the_prompt() -> None:
    """A conversation stays where its beginning was sent, and a new one goes to where less work is."""
    known = candidates(4)
    strategy = PrefixAware(PrefixHistory(1000), 1.25)
    first = strategy.order(known, RouteRequest("m", (1, 2)))[0]
    strategy.sent(first, RouteRequest("m", (1, 2)))
    other = strategy.order(known, RouteRequest("m", (7, 8)))[0]
    strategy.sent(other, RouteRequest("m", (7, 8)))
    assert other is not first
    for number in range(2, 4):  # the others get as much
        strategy.sent(known[number], RouteRequest("m", (number * 10, number * 10 + 1)))
    assert strategy.order(known, RouteRequest("m", (1, 2, 3)))[0] is first


def test_prefix_aware_believes_an_upstream_before_its_own_history() -> None:
    """An upstream that says it holds nothing any more is not preferred for what it was sent."""
    known = candidates(2)
    strategy = PrefixAware(PrefixHistory(1000), 10)
    strategy.sent(known[0], RouteRequest("m", (1, 2)))
    strategy.sent(known[1], RouteRequest("m", (3, 4)))
    assert strategy.order(known, RouteRequest("m", (1, 2)))[0] is known[0]
    assert strategy.order(known, RouteRequest("m", (1, 2), {"a": 0.0, "b": 0.9}))[0] is known[1]


def test_prefix_aware_passes_over_an_upstream_that_is_busy_with_long_answers() -> None:
    """It holds the prompt and was sent no more than the others, but its requests do not end."""
    known = candidates(2)
    strategy = PrefixAware(PrefixHistory(1000), 1.25)
    strategy.sent(known[0], RouteRequest("m", (1, 2)))
    strategy.sent(known[1], RouteRequest("m", (3, 4)))
    assert strategy.order(known, RouteRequest("m", (1, 2)))[0] is known[0]
    known[0].in_flight = 20
    assert strategy.order(known, RouteRequest("m", (1, 2)))[0] is known[1]


def test_a_prefix_that_all_share_makes_no_hot_spot() -> None:
    """Of requests that all begin alike and stay under way, no upstream has more than the bound allows."""
    known = candidates(4)
    strategy = PrefixAware(PrefixHistory(1000), 1.25)
    for number in range(400):
        request = RouteRequest("m", (1, 2, 3, 4, 1000 + number))
        chosen = strategy.order(known, request)[0]
        strategy.sent(chosen, request)
        chosen.in_flight += 1
    assert max(candidate.in_flight for candidate in known) <= 1.3 * 100


def test_a_prefix_that_all_share_makes_no_hot_spot_of_short_requests() -> None:
    """The same where each request is over before the next one comes, so that nothing is under way."""
    known = candidates(4)
    strategy = PrefixAware(PrefixHistory(1000), 1.25)
    sent: Counter[str] = Counter()
    for number in range(400):
        request = RouteRequest("m", (1, 2, 3, 4, 1000 + number))
        chosen = strategy.order(known, request)[0]
        strategy.sent(chosen, request)
        sent[chosen.name] += 1
    assert max(sent.values()) <= 1.3 * 100


def test_model_aware_stays_where_the_model_is_until_loading_it_elsewhere_is_faster() -> None:
    """With a cold start of 10 s and answers after 1 s, the eleventh waiting request goes to another upstream."""
    known = candidates(2)
    for candidate in known:
        candidate.latency = 1.0
    strategy = ModelAware(LoadedModels(), cold_start=10.0)
    strategy.sent(known[0], ASKED)
    known[0].in_flight = 9
    assert strategy.order(known, ASKED)[0] is known[0]
    known[0].in_flight = 11
    assert strategy.order(known, ASKED)[0] is known[1]


def test_a_model_that_has_not_been_used_is_taken_for_unloaded() -> None:
    """After five minutes without a request an upstream counts as cold."""
    now = 0.0
    loaded = LoadedModels(lambda: now)
    a, b = candidates(2)
    loaded.note(a.name, "m")
    assert loaded.has(a, "m")
    assert not loaded.has(b, "m")
    assert not loaded.has(a, "other")
    now = 301.0
    assert not loaded.has(a, "m")


def test_an_upstream_that_tells_what_is_loaded_is_believed() -> None:
    """It has what it says, and what it was sent after it said so, and nothing else."""
    now = 10.0
    loaded = LoadedModels(lambda: now)
    a, _ = candidates(2)
    a.loaded = LoadedReport(frozenset({"told"}), 20.0)
    loaded.note(a.name, "unloaded since")
    now = 30.0
    loaded.note(a.name, "sent since")
    assert [loaded.has(a, model) for model in ("told", "sent since", "unloaded since", "never")] == [
        True,
        True,
        False,
        False,
    ]


@given(share=st.floats(0, 1), count=st.integers(1, 300))
def test_a_canary_has_its_exact_share(share: float, count: int) -> None:
    """Of n requests it gets its share of n, to within one, and of the others none comes first to it."""
    known = candidates(3)
    strategy = Canary(LeastConnections(), {"c": share})
    first = [strategy.order(known, ASKED)[0].name for _ in range(count)]
    assert abs(first.count("c") - share * count) < 1 + 1e-6


def test_two_canaries_have_their_shares() -> None:
    """10 % and 25 % of 200 requests, and the rest divided among the others."""
    known = candidates(4)
    strategy = Canary(RoundRobin(), {"c": 0.1, "d": 0.25})
    first = Counter(strategy.order(known, ASKED)[0].name for _ in range(200))
    assert abs(first["c"] - 20) <= 1
    assert abs(first["d"] - 50) <= 1
    assert abs(first["a"] - first["b"]) <= 1
