"""The command `keepgate route`: simulates the strategies on recorded traffic."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from gateway.commands.route_simulation import Outcome, Speed, simulate
from gateway.routing.prefixes.history import PrefixHistory
from gateway.routing.strategies.load import PowerOfTwo
from gateway.routing.strategies.model_aware import LoadedModels
from gateway.routing.strategies.registry import STRATEGIES, strategy_of
from gateway.routing.strategy import Strategy
from gateway.settings.upstreams import RoutingSettings
from gateway.settings.upstreams import Strategy as StrategyName
from prefix_store.eviction.access import Access
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.tree import BlockTree
from prefix_store.replay.read import read_trace
from prefix_store.replay.trace import Trace, TraceError, TraceRequest

_DESCRIPTION = """\
Show what each routing strategy would have done with recorded traffic: how many blocks of prompts are found in the KV
cache of the upstream, how evenly the work is divided, and how long the first token takes. TRACE is a file as for
`keepgate replay`."""

_NOTES = """\
A simulation: every upstream computes one prompt after the other at --prefill-speed, without the tokens that its cache
holds (LRU, the end of a prompt first), and answers at 20 ms a token beside that. Blocks shorter than 512 tokens are
put together.

examples:
  keepgate route --trace conversation.jsonl.gz --upstreams 4 --blocks 20000
  keepgate route --trace conversation.jsonl.gz --upstreams 8 --rate 2 --strategy prefix-aware --strategy round-robin"""

_LEAST_BLOCK_TOKENS = 512
_SEED = 1


class _Parser(argparse.ArgumentParser):
    """Prints an error in one line, with a reference to --help."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


class LruCache:
    """The eviction code of the prefix store, as the KV cache of an upstream."""

    def __init__(self, capacity: int) -> None:
        self._tree: BlockTree[int] = BlockTree(capacity, LeastRecentlyUsed(), remembered=0.0)

    def use(self, keys: Sequence[int], time: float) -> int:
        leading = self._tree.lookup(keys)
        self._tree.use(keys, Access(time))
        return leading


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 2 if an argument or the trace is wrong."""
    parsed = _parser().parse_args(words)
    try:
        trace = read_trace(parsed.trace)
    except TraceError as error:
        for line in error.lines:
            print(f"keepgate route: {line}", file=sys.stderr)
        return 2
    if not trace.has_prefixes:
        print(f"keepgate route: {parsed.trace}: does not say what prompts share", file=sys.stderr)
        return 2
    trace = coarse(trace)
    routing = RoutingSettings(load_bound=parsed.load_bound, prefix_blocks=parsed.blocks)
    names = parsed.strategy or STRATEGIES
    outcomes = {
        name: simulated(trace, name, routing, parsed.upstreams, parsed.blocks, parsed.rate, parsed.prefill_speed)
        for name in names
    }
    if parsed.json:
        print(json.dumps({name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}, indent=2))
    else:
        print("\n".join(_table(trace, parsed, outcomes)))
    return 0


def simulated(
    trace: Trace,
    name: StrategyName,
    routing: RoutingSettings,
    upstreams: int,
    blocks: int,
    rate: float = 1.0,
    prefill_speed: float = Speed().prefill,
) -> Outcome:
    """What a strategy does with a trace, on upstreams that divide `blocks` among them. Deterministic."""
    caches = [LruCache(max(1, blocks // upstreams)) for _ in range(upstreams)]
    strategy: Strategy = (
        PowerOfTwo(_SEED)
        if name == "power-of-two"
        else strategy_of(
            name, routing, PrefixHistory(max(1, routing.prefix_blocks // upstreams)), LoadedModels(lambda: 0.0)
        )
    )
    speed = Speed(prefill=prefill_speed)
    return simulate(trace.requests(), trace.block_tokens, strategy, caches, speed, rate)


def coarse(trace: Trace) -> Trace:
    """The trace in blocks of at least 512 tokens: a number stands for all that comes before it, so of several blocks
    the last one is enough.
    """
    together = math.ceil(_LEAST_BLOCK_TOKENS / trace.block_tokens)
    if together == 1:
        return trace

    def requests() -> Iterator[TraceRequest]:
        for request in trace.requests():
            yield request._replace(keys=request.keys[together - 1 :: together])

    return dataclasses.replace(trace, block_tokens=trace.block_tokens * together, requests=requests)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="keepgate route",
        description=_DESCRIPTION,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--trace", metavar="TRACE", type=Path, required=True, help="the recorded traffic")
    parser.add_argument(
        "--upstreams", metavar="N", type=_count, required=True, help="among how many upstreams it is divided"
    )
    parser.add_argument(
        "--blocks", metavar="N", type=_count, default=20_000, help="blocks in the caches of all together (20000)"
    )
    parser.add_argument(
        "--rate", metavar="X", type=_positive, default=1.0, help="how many times as fast as recorded requests come (1)"
    )
    parser.add_argument(
        "--strategy", action="append", choices=STRATEGIES, help="only this one; may be given again (all of them)"
    )
    parser.add_argument(
        "--load-bound",
        metavar="X",
        type=_bound,
        default=RoutingSettings().load_bound,
        help="the setting routing.load_bound (1.25)",
    )
    parser.add_argument(
        "--prefill-speed",
        metavar="N",
        type=_positive,
        default=Speed().prefill,
        help="tokens of prompts that an upstream computes in a second (12000)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number more than 0")
    return number


def _bound(text: str) -> float:
    bound = _positive(text)
    if not 1 <= bound <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 10")
    return bound


def _table(trace: Trace, parsed: argparse.Namespace, outcomes: dict[StrategyName, Outcome]) -> list[str]:
    lines = [
        f"{trace.style} trace: {trace.count:,} requests, {parsed.rate:g} times as fast as recorded, to"
        f" {parsed.upstreams} upstreams",
        f"with {parsed.blocks:,} blocks of {trace.block_tokens} tokens in all, at {parsed.prefill_speed:,.0f} prompt"
        " tokens a second each.",
        "Busiest upstream: its requests, and the tokens that it computed, in means of all upstreams.",
        "",
        f"{'':<18} {'blocks found':>12} {'requests':>9} {'tokens':>7} {'first token p50':>16} {'p99':>9}",
    ]
    for name, outcome in outcomes.items():
        median, slow = outcome.first_token
        lines.append(
            f"{name:<18} {100 * outcome.block_hits:>10.2f} % {outcome.requests:>9.3f} {outcome.computed:>7.3f}"
            f" {median:>14.2f} s {slow:>7.2f} s"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
