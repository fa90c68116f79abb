"""Replays of real and synthetic traces against known figures."""

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_store.eviction.access import Access
from prefix_store.eviction.hazard import HazardPolicy
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.replay.belady import Belady
from prefix_store.replay.caches import PrefixAware, RoundRobin, SingleCache
from prefix_store.replay.read import read_trace
from prefix_store.replay.replay import replay
from prefix_store.replay.trace import Trace, TraceRequest
from tests.prefix_store.replay.slow_caches import lru_hits, most_hits

TRACES = Path(__file__).resolve().parents[3] / "benchmarks" / "data" / "traces"


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return read_trace(TRACES / "mooncake_conversation.jsonl.gz")


def trace_of(chains: list[list[int]]) -> Trace:
    requests = [TraceRequest(float(number), len(keys), 5, keys) for number, keys in enumerate(chains)]
    return Trace("mooncake", 1, len(requests), lambda: iter(requests))


def belady_of(trace: Trace) -> Belady:
    endless = SingleCache(10**9, LeastRecentlyUsed(), trace.block_tokens)
    for request in trace.requests():
        endless.see(request, Access(request.time))
    return Belady(trace, endless.tree)


CHAINS = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=3).map(
        # Blocks are the nodes of a binary tree, numbered as in a heap.
        lambda turns: [
            sum(2**i for i in range(n)) + int("".join(map(str, turns[:n])), 2) for n in range(1, len(turns) + 1)
        ]
    ),
    min_size=1,
    max_size=9,
)


@given(CHAINS, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_belady_finds_as_much_as_any_cache_can(chains: list[list[int]], capacity: int) -> None:
    """On small traces it equals an exhaustive search."""
    if len({key for chain in chains for key in chain}) <= 8:
        assert belady_of(trace_of(chains)).hits(capacity).hit_blocks == most_hits(chains, capacity)


@pytest.mark.parametrize("capacity", [50, 400, 2_000])
def test_the_start_of_the_conversation_trace_is_as_the_slow_way_finds_it(conversation: Trace, capacity: int) -> None:
    """The count equals that of a simple, slow LRU cache."""
    requests = list(islice(conversation.requests(), 300))
    cache = SingleCache(capacity, LeastRecentlyUsed(), 512)
    for request in requests:
        cache.see(request, Access(request.time))
    assert cache.hits.hit_blocks == lru_hits([request.keys for request in requests], capacity)


@pytest.mark.parametrize(("capacity", "percent"), [(1_000, 4.45), (5_000, 11.18), (20_000, 28.78), (10**9, 36.64)])
def test_the_conversation_trace_gives_its_published_oracles(conversation: Trace, capacity: int, percent: float) -> None:
    """The hit ratio of an LRU cache equals the published digits."""
    cache = SingleCache(capacity, LeastRecentlyUsed(), 512)
    for request in conversation.requests():
        cache.see(request, Access(request.time))
    assert round(100 * cache.hits.ratios["block_hit_ratio"], 2) == percent


def test_routing_by_prefix_finds_what_one_pool_would(conversation: Trace) -> None:
    """Four engines with requests in turn find less than half of it."""
    in_turn, by_prefix = RoundRobin(20_000, 4, 512), PrefixAware(20_000, 4, 512)
    for request in conversation.requests():
        in_turn.see(request, Access(request.time))
        by_prefix.see(request, Access(request.time))
    assert round(100 * in_turn.hits.ratios["block_hit_ratio"], 1) == 12.1
    assert round(100 * by_prefix.hits.ratios["block_hit_ratio"], 1) == 28.8


def test_the_default_policy_finds_more_than_the_order_of_uses(conversation: Trace) -> None:
    """On the first part of the conversation trace, at two capacities; Belady finds most."""
    requests = list(islice(conversation.requests(), 2_000))
    part = Trace("mooncake", 512, len(requests), lambda: iter(requests))
    said: list[float] = []
    report = replay(part, [1_500, 6_000], 4, said.append)
    for name in ("1500", "6000"):
        found = {policy: ratios["block_hit_ratio"] for policy, ratios in report[name]["policies"].items()}
        assert found["lru"] < found["hazard"] < found["belady"] <= report["infinite"]["block_hit_ratio"]
        assert report[name]["block_hit_ratio"] == found["hazard"]
        assert report[name]["routing"]["shared"]["block_hit_ratio"] == found["lru"]
    assert said == sorted(said)
    assert said[-1] == 1.0
    curve = {point["capacity"]: point["block_hit_ratio"] for point in report["curve"]}
    assert list(curve.values())[-1] == pytest.approx(report["infinite"]["block_hit_ratio"], abs=0.01)
    advised = SingleCache(report["advice"]["capacity"], HazardPolicy(), 512)
    for request in requests:
        advised.see(request, Access(request.time, output_length=request.output_length))
    assert advised.hits.ratios["block_hit_ratio"] == pytest.approx(
        0.9 * report["infinite"]["block_hit_ratio"], abs=0.02
    )


def test_a_trace_in_which_nothing_repeats_is_no_fault() -> None:
    """All ratios are zero, and any capacity is enough."""
    report = replay(trace_of([[1, 2], [3], []]), [2], 2, lambda share: None)
    assert report["infinite"] == {"block_hit_ratio": 0.0, "token_hit_ratio": 0.0}
    assert report["2"]["policies"]["belady"]["block_hit_ratio"] == 0.0
    assert report["advice"]["capacity"] == 1


def test_token_ratios_count_no_more_tokens_than_there_are() -> None:
    """The last block of a prompt is not full; finding it finds its tokens only."""
    requests = [TraceRequest(0.0, 5, 1, [1, 2]), TraceRequest(1.0, 5, 1, [1, 2])]
    trace = Trace("mooncake", 4, 2, lambda: iter(requests))
    assert replay(trace, [9], 1, lambda share: None)["9"]["token_hit_ratio"] == 0.5
