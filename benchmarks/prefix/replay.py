"""What the prefix store finds of recorded traffic, at several capacities, against the order of uses and the optimum.

As a program it replays one trace, in a process of its own: `python -m benchmarks.prefix.replay mooncake_conversation
5000 20000`.
"""

import argparse
import json
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

import msgspec

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import run_on_subject_core
from prefix_store.eviction.access import Access
from prefix_store.eviction.hazard import HazardPolicy
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.tree import BlockTree
from prefix_store.replay.belady import Belady
from prefix_store.replay.caches import SingleCache
from prefix_store.replay.read import read_trace
from prefix_store.replay.trace import Trace

_TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
_CONVERSATION, _AGENT = "mooncake_conversation", "coding_agent"
_CAPACITIES = {
    _CONVERSATION: (1_000, 2_000, 5_000, 10_000, 20_000, 50_000),
    _AGENT: (5_000, 10_000, 20_000, 35_000, 50_000, 100_000),
}
_QUICK_CAPACITIES = {_CONVERSATION: (5_000, 20_000, 50_000), _AGENT: (10_000, 50_000)}
_QUICK_REQUESTS = 3_000
_TARGETS = {
    (_CONVERSATION, 5_000): 16.0,
    (_CONVERSATION, 20_000): 29.5,
    (_CONVERSATION, 50_000): 35.5,
    (_AGENT, 10_000): 52.0,
    (_AGENT, 50_000): 87.0,
}
_CHAIN, _CHAINS, _USES = 2_000, 16, 2_000
_METHOD = """\
The traces of benchmarks/data/traces through the eviction code of the store; one core. A hit is a leading block of a
prompt that is there with all that comes before it; every block enters when its request arrives, and answers take no
time. `hazard` is the store's policy, `lru` evicts the chain that was used least recently, `belady` knows the future and
is the most that any cache can hit. The output length of a request, by which hazard learns, is known at its arrival.
Share of the gap: (hazard - lru) / (belady - lru). Conversations of the agent trace follow each other at 65 users who
begin at the same time; the trace does not say how they lay."""


class Cell(msgspec.Struct):
    """Block hit ratios at one capacity, in per cent."""

    capacity: int
    hazard: float
    lru: float
    belady: float

    @property
    def share(self) -> float:
        """Of the way from lru to belady, in per cent; 100 where lru is as good as belady already."""
        gap = self.belady - self.lru
        return 100 * (self.hazard - self.lru) / gap if gap else 100.0


class Replayed(msgspec.Struct):
    """What one process found of a trace; `infinite` in per cent."""

    infinite: float
    cells: list[Cell]


async def measure(quick: bool) -> Figure:
    found: dict[str, Replayed] = {}
    for name, capacities in (_QUICK_CAPACITIES if quick else _CAPACITIES).items():
        words = [name, *map(str, capacities), *(["--quick"] if quick else [])]
        found[name] = msgspec.json.decode(await run_on_subject_core("benchmarks.prefix.replay", *words), type=Replayed)
    rows = [
        Row(
            what="conversation trace, endless cache: block hit ratio",
            unit="%",
            rounds=(found[_CONVERSATION].infinite,),
            target=Target("least", 36.6),
        ),
        *(_row(name, cell) for name, replayed in found.items() for cell in replayed.cells),
        *_over_all(found),
    ]
    command = json.loads(await run_on_subject_core("benchmarks.prefix.replay", "--speed"))
    rows += [
        Row(
            what="conversation trace, the command at two capacities",
            unit="s",
            rounds=(command["seconds"],),
            target=Target("most", 60.0),
        ),
        *(
            Row(
                what=f"uses of chains of 2,000 blocks, {policy}",
                unit="million blocks/s",
                rounds=(command[policy],),
                target=Target("least", 2.0),
            )
            for policy in ("hazard", "lru")
        ),
    ]
    return Figure(figure="prefix_replay", title="Which KV blocks are kept", method=_METHOD, rows=tuple(rows))


def _row(name: str, cell: Cell) -> Row:
    wanted = _TARGETS.get((name, cell.capacity))
    return Row(
        what=f"{'conversation' if name == _CONVERSATION else 'agent'} trace, {cell.capacity:,} blocks: block hit ratio",
        unit="%",
        rounds=(cell.hazard,),
        target=Target("least", wanted) if wanted is not None else None,
        beside=({"lru": cell.lru, "belady": cell.belady, "share of the gap": cell.share},),
    )


def _over_all(found: dict[str, Replayed]) -> list[Row]:
    cells = [cell for replayed in found.values() for cell in replayed.cells]
    return [
        Row(
            what=f"mean share of the gap from lru to belady, {len(cells)} cells",
            unit="%",
            rounds=(statistics.mean(cell.share for cell in cells),),
            target=Target("least", 25.0),
        ),
        Row(
            what="worst cell: hazard above lru",
            unit="points",
            rounds=(min(cell.hazard - cell.lru for cell in cells),),
            target=Target("least", -0.3),
        ),
    ]


def _replayed(name: str, capacities: list[int], quick: bool) -> Replayed:
    trace = read_trace(_TRACES / f"{name}.jsonl.gz")
    if quick:
        first = list(islice(trace.requests(), _QUICK_REQUESTS))
        trace = Trace(trace.style, trace.block_tokens, len(first), lambda: iter(first))
    endless = SingleCache(2**62, LeastRecentlyUsed(), trace.block_tokens, remembered=0.0)
    for request in trace.requests():
        endless.see(request, Access(request.time))
    belady = Belady(trace, endless.tree)
    del endless.tree
    caches = [
        (
            SingleCache(capacity, HazardPolicy(), trace.block_tokens),
            SingleCache(capacity, LeastRecentlyUsed(), trace.block_tokens),
        )
        for capacity in capacities
    ]
    for request in trace.requests():
        access = Access(request.time, output_length=request.output_length)
        for hazard, lru in caches:
            hazard.see(request, access)
            lru.see(request, access)
    cells = [
        Cell(
            capacity, *(100 * hits.ratios["block_hit_ratio"] for hits in (hazard.hits, lru.hits, belady.hits(capacity)))
        )
        for capacity, (hazard, lru) in zip(capacities, caches, strict=True)
    ]
    return Replayed(100 * endless.hits.ratios["block_hit_ratio"], cells)


def _speed() -> dict[str, float]:
    """Seconds of CPU time of the command's work, and uses of long chains in millions of blocks a second."""
    from prefix_store.replay.replay import replay

    began = time.process_time()
    replay(read_trace(_TRACES / f"{_CONVERSATION}.jsonl.gz"), [5_000, 20_000], 4, lambda share: None)
    found = {"seconds": time.process_time() - began}
    for name, policy in (("hazard", HazardPolicy), ("lru", LeastRecentlyUsed)):
        tree: BlockTree[bytes] = BlockTree(_CHAIN * _CHAINS, policy())
        chains = [[f"{chain}:{block}".encode() for block in range(_CHAIN)] for chain in range(_CHAINS)]
        began = time.process_time()
        for turn in range(_USES):
            tree.use(chains[turn % _CHAINS], Access(float(turn), output_length=100))
        found[name] = _CHAIN * _USES / (time.process_time() - began) / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", nargs="?", choices=[_CONVERSATION, _AGENT])
    parser.add_argument("capacities", nargs="*", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    found = _speed() if options.speed else _replayed(options.trace, options.capacities, options.quick)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
