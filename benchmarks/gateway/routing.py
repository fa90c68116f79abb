"""What each strategy of routing does with recorded traffic, in a simulation.

As a program it prints the figures as JSON: `python -m benchmarks.gateway.routing`.
"""

import argparse
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import run_on_subject_core
from gateway.commands.route import coarse, simulated
from gateway.routing.prefixes.history import PrefixHistory
from gateway.routing.prefixes.prompt_blocks import prompt_blocks
from gateway.routing.strategies.prefix_aware import PrefixAware
from gateway.routing.strategies.registry import STRATEGIES
from gateway.routing.strategy import RouteRequest
from gateway.settings.upstreams import RoutingSettings
from prefix_store.replay.read import read_trace
from prefix_store.replay.trace import Trace

_TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
_CONVERSATION, _AGENT = "mooncake_conversation", "coding_agent"
_NAMES = {_CONVERSATION: "conversation", _AGENT: "agent"}
_UPSTREAMS, _BLOCKS = 4, 20_000
_QUICK_REQUESTS = 3_000
_MESSAGES, _PARAGRAPH = 26, "The upstream holds the blocks of this prompt. " * 21
_TIMES = 2_000
_METHOD = """\
A simulation, the same in every run: `keepgate route` on the traces of benchmarks/data/traces, as fast as recorded, with
four upstreams that have caches for 20,000 blocks of 512 tokens together (LRU, the end of a prompt first). An upstream
computes one prompt after the other, 12,000 tokens a second without those of blocks that it holds; answers take 20 ms a
token beside that. The agent trace's blocks of 64 tokens are put together to 512. Imbalance is the most of any upstream,
in means of all: of requests, and of tokens that were computed. `prefix-aware` knows only what it has sent, and takes
the caches to be as large as they are; a row has it take them to be four times as large. One pool of 20,000 blocks would
find 28.8 % of the conversation trace. The times are CPU time on one core: blocks of a chat of 26 messages and 26 KB
from its decoded fields, and `order` and `sent` for 26 blocks and four upstreams."""


class Found(msgspec.Struct):
    """What one strategy did with one trace."""

    hits: float
    requests: float
    computed: float
    median: float
    slow: float


class Measured(msgspec.Struct):
    """All that the program prints; times in microseconds."""

    outcomes: dict[str, dict[str, Found]]
    larger: Found
    blocks: float
    choice: float


async def measure(quick: bool) -> Figure:
    words = ["--quick"] if quick else []
    found = msgspec.json.decode(await run_on_subject_core("benchmarks.gateway.routing", *words), type=Measured)
    rows: list[Row] = []
    for trace, outcomes in found.outcomes.items():
        for strategy, outcome in outcomes.items():
            is_wanted = (trace, strategy) == ("conversation", "prefix-aware")
            rows += _rows(f"{trace} trace, {strategy}", outcome, 28.0 if is_wanted and not quick else None)
    rows += _rows("conversation trace, prefix-aware, caches taken to be four times as large", found.larger, None)
    rows += [
        Row(what="blocks of a prompt of 26 KB", unit="µs", rounds=(found.blocks,)),
        Row(what="prefix-aware: order and sent, 26 blocks", unit="µs", rounds=(found.choice,)),
    ]
    return Figure(figure="routing", title="Which upstream answers", method=_METHOD, rows=tuple(rows))


def _rows(what: str, found: Found, wanted: float | None) -> list[Row]:
    return [
        Row(
            what=f"{what}: block hits",
            unit="%",
            rounds=(found.hits,),
            target=Target("least", wanted) if wanted is not None else None,
            beside=({"first token p50 s": found.median, "first token p99 s": found.slow},),
        ),
        Row(
            what=f"{what}: imbalance",
            unit="means",
            rounds=(max(found.requests, found.computed),),
            target=Target("most", 1.3) if wanted is not None else None,
            beside=({"requests": found.requests, "computed tokens": found.computed},),
        ),
    ]


def _measured(quick: bool) -> Measured:
    outcomes: dict[str, dict[str, Found]] = {}
    traces = {name: _trace(name, quick) for name in _NAMES}
    for name, trace in traces.items():
        outcomes[_NAMES[name]] = {strategy: _found(trace, strategy, _BLOCKS) for strategy in STRATEGIES}
    larger = _found(traces[_CONVERSATION], "prefix-aware", 4 * _BLOCKS)
    return Measured(outcomes, larger, _blocks_time(), _choice_time())


def _trace(name: str, quick: bool) -> Trace:
    trace = coarse(read_trace(_TRACES / f"{name}.jsonl.gz"))
    if not quick:
        return trace
    first = list(islice(trace.requests(), _QUICK_REQUESTS))
    return Trace(trace.style, trace.block_tokens, len(first), lambda: iter(first))


def _found(trace: Trace, strategy: Any, remembered: int) -> Found:
    outcome = simulated(trace, strategy, RoutingSettings(prefix_blocks=remembered), _UPSTREAMS, _BLOCKS)
    return Found(100 * outcome.block_hits, outcome.requests, outcome.computed, *outcome.first_token)


def _blocks_time() -> float:
    fields = {"messages": [{"role": "user", "content": _PARAGRAPH} for _ in range(_MESSAGES)]}
    began = time.process_time()
    for _ in range(_TIMES):
        prompt_blocks("tenant", fields)
    return (time.process_time() - began) / _TIMES * 1e6


class _Idle:
    """An upstream without requests."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.in_flight = 0
        self.latency = 0.0
        self.loaded = None


def _choice_time() -> float:
    strategy = PrefixAware(PrefixHistory(_BLOCKS), RoutingSettings().load_bound)
    upstreams = [_Idle(str(number)) for number in range(_UPSTREAMS)]
    began = time.process_time()
    for number in range(_TIMES):
        request = RouteRequest("m", tuple(range(number % 50 * 100, number % 50 * 100 + 26)))
        strategy.sent(strategy.order(upstreams, request)[0], request)
    return (time.process_time() - began) / _TIMES * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    sys.stdout.buffer.write(msgspec.json.encode(_measured(parser.parse_args().quick)))


if __name__ == "__main__":
    main()
