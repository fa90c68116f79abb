"""Replays a trace with the store's eviction code, for several capacities and policies."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil, exp2, log2
from typing import Any

from prefix_store.eviction.access import Access
from prefix_store.eviction.ghost_caches import GhostCaches
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.policies import DEFAULT_POLICY, POLICIES
from prefix_store.replay.belady import Belady
from prefix_store.replay.caches import Cache, PrefixAware, RoundRobin, SingleCache
from prefix_store.replay.trace import Trace, TraceRequest

ENOUGH = 0.9
"""The recommended capacity has this share of an endless cache's hits."""

_EVERYTHING = 2**62
_SAMPLED_BLOCKS = 16_384
_CURVE_HALVINGS = 7

Report = dict[str, Any]
"""What `replay` returns, ready for JSON."""


def replay(trace: Trace, capacities: Sequence[int], engines: int, progress: Callable[[float], None]) -> Report:
    """Runs a trace and returns the report.

    Args:
        capacities: in blocks; each is simulated exactly.
        engines: among how many a capacity is divided, to compare routing.
        progress: called with the share of the work that is done.

    Returns:
        `trace` (what it is), `infinite` and each capacity as a string: `block_hit_ratio` and `token_hit_ratio` of the
        policy that the store has by default, and for a capacity those of all `policies` and of `routing`; `curve`
        (sampled ghost caches of the default policy), `advice`. Ratios of a trace without prefixes are None.
    """
    about = {"style": trace.style, "requests": trace.count, "block_tokens": trace.block_tokens}
    if not trace.has_prefixes:
        return {"trace": about} | _without_prefixes(trace, capacities)
    steps = _Steps(trace, progress, passes=2)
    endless = SingleCache(_EVERYTHING, LeastRecentlyUsed(), trace.block_tokens, remembered=0.0)
    seconds = 0.0
    for request in steps.requests():
        endless.see(request, _access_of(request))
        seconds = request.time
    different = len(endless.tree)
    about |= {"blocks": endless.hits.blocks, "different_blocks": different, "seconds": seconds}
    belady = Belady(trace, endless.tree)
    del endless.tree
    single = {
        (capacity, name): SingleCache(capacity, policy(), trace.block_tokens)
        for capacity in capacities
        for name, policy in POLICIES.items()
    }
    divided: dict[tuple[int, str], Cache] = {}
    for capacity in capacities:
        divided[capacity, "round_robin"] = RoundRobin(capacity, engines, trace.block_tokens)
        divided[capacity, "prefix_aware"] = PrefixAware(capacity, engines, trace.block_tokens)
    ghosts: GhostCaches[int] = GhostCaches(
        _curve_capacities(different), min(1.0, _SAMPLED_BLOCKS / max(1, different)), POLICIES[DEFAULT_POLICY]
    )
    caches: list[Cache] = [*single.values(), *divided.values()]
    for request in steps.requests():
        access = _access_of(request)
        for cache in caches:
            cache.see(request, access)
        ghosts.use(request.keys, access)
    found: Report = {"trace": about, "infinite": endless.hits.ratios}
    for capacity in capacities:
        policies = {name: single[capacity, name].hits.ratios for name in POLICIES}
        found[str(capacity)] = {
            **policies[DEFAULT_POLICY],
            "policy": DEFAULT_POLICY,
            "policies": {**policies, "belady": belady.hits(capacity).ratios},
            "routing": {
                "engines": engines,
                "policy": "lru",
                **{way: divided[capacity, way].hits.ratios for way in ("round_robin", "prefix_aware")},
                "shared": policies["lru"],
            },
        }
    curve = ghosts.ratios()
    found["curve"] = [{"capacity": capacity, "block_hit_ratio": ratio} for capacity, ratio in curve.items()]
    found["advice"] = {
        "share_of_infinite": ENOUGH,
        "capacity": _smallest(curve, ENOUGH * endless.hits.ratios["block_hit_ratio"]),
        "sampled": ghosts.rate,
    }
    return found


class _Steps:
    """Passes over a trace, and their progress."""

    def __init__(self, trace: Trace, progress: Callable[[float], None], passes: int) -> None:
        self._trace, self._progress = trace, progress
        self._all = max(1, trace.count * passes)
        self._done = 0

    def requests(self) -> Iterator[TraceRequest]:
        for request in self._trace.requests():
            yield request
            self._done += 1
            self._progress(self._done / self._all)


def _access_of(request: TraceRequest) -> Access:
    """The output length is known from the arrival on: a trace has it."""
    return Access(request.time, output_length=request.output_length)


def _curve_capacities(different: int) -> list[int]:
    """From a 128th of all blocks to all of them, each twice the one before."""
    return sorted({max(1, -(-different // 2**halvings)) for halvings in range(_CURVE_HALVINGS + 1)})


def _smallest(curve: Mapping[int, float], wanted: float) -> int | None:
    """The smallest capacity with this hit ratio, interpolated by the logarithm; to two digits."""
    below, ratio_below = 0, 0.0
    for capacity, ratio in curve.items():
        if ratio >= wanted:
            exponent = log2(capacity)
            if below:
                share = (wanted - ratio_below) / (ratio - ratio_below)
                exponent = log2(below) + share * (exponent - log2(below))
            exact = exp2(exponent)
            unit: int = 10 ** max(0, len(str(int(exact))) - 2)
            return ceil(exact / unit) * unit
        if ratio > ratio_below:
            below, ratio_below = capacity, ratio
    return None


def _without_prefixes(trace: Trace, capacities: Sequence[int]) -> Report:
    """The report of a trace without shared prefixes: how long blocks would stay."""
    blocks = 0
    seconds = 0.0
    for request in trace.requests():
        blocks += -(-request.input_length // trace.block_tokens)
        seconds = request.time
    nothing: Iterable[str] = ("block_hit_ratio", "token_hit_ratio")
    rate = blocks / seconds if seconds else None
    return {
        "load": {"blocks": blocks, "seconds": seconds, "blocks_per_second": rate},
        "infinite": dict.fromkeys(nothing),
        **{
            str(capacity): {**dict.fromkeys(nothing), "seconds_kept": capacity / rate if rate else None}
            for capacity in capacities
        },
        "advice": None,
    }
