"""The command `keepgate simulate`."""

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, get_args

from gateway.commands.route import LruCache, coarse
from gateway.commands.simulation import report_text
from gateway.commands.simulation.capacity import Workload, needed, utilisations
from gateway.commands.simulation.figures import Figures, Fleet, InvalidFigure, overridden
from gateway.commands.simulation.run import Death, Mortal, Options, Result, simulate
from gateway.commands.simulation.traffic import Traffic, requests
from gateway.routing.prefixes.history import PrefixHistory
from gateway.routing.strategies.load import PowerOfTwo
from gateway.routing.strategies.model_aware import LoadedModels
from gateway.routing.strategies.registry import STRATEGIES, strategy_of
from gateway.routing.strategy import Strategy
from gateway.settings.upstreams import RoutingSettings
from gateway.settings.upstreams import Strategy as StrategyName
from prefix_store.replay.read import read_trace
from prefix_store.replay.trace import Trace, TraceError

_DESCRIPTION = """\
Show what a number of gateways, Redis nodes and backends would do with recorded traffic: what each layer of the cache
answers, how busy each kind of node is, what waits, which node is the bottleneck, and what fails when one dies. TRACE is
a file as for `keepgate replay`."""

_NOTES = """\
A simulation of queues: docs/guides/scaling.md says what it assumes, and how near it is to the real thing. `computed` is
what the capacity model says without queues; --plan uses it for other rates. What each step takes is measured where
there is a measurement: --figures lists them with their sources, --set NAME=NUMBER replaces one.

Traces of prompts have few questions that come again, for they were recorded behind no cache: --repeats adds them.

examples:
  keepgate simulate --trace conversation.jsonl.gz
  keepgate simulate --trace conversation.jsonl.gz --repeats 0.4 --copies 30 --seconds 600 --gateways 4 --backends 80
  keepgate simulate --trace conversation.jsonl.gz --repeats 0.4 --plan 10,1000,100000
  keepgate simulate --trace conversation.jsonl.gz --kill backend:0@600 --kill gateway:1@1200
  keepgate simulate --trace conversation.jsonl.gz --set prefill_speed=30000 --set token=0.012"""

_SEED = 1
_KINDS: dict[str, Mortal] = {kind: kind for kind in get_args(Mortal)}
_DEATH = re.compile(r"(gateway|redis|backend):(\d{1,6})@(\d{1,9}(?:\.\d*)?)", re.ASCII)


class _Parser(argparse.ArgumentParser):
    """Prints an error in one line, with a reference to --help."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 2 if an argument or the trace is wrong."""
    parser = _parser()
    parsed = parser.parse_args(words)
    try:
        figures = overridden(Figures(), parsed.set)
    except InvalidFigure as error:
        parser.error(f"argument --set: {error}")
    if parsed.figures:
        print("\n".join(report_text.sources(figures)))
        return 0
    if parsed.trace is None:
        parser.error("the following arguments are required: --trace")
    try:
        trace = coarse(read_trace(parsed.trace))
    except TraceError as error:
        for line in error.lines:
            print(f"keepgate simulate: {line}", file=sys.stderr)
        return 2
    traffic = Traffic(parsed.rate, parsed.copies, parsed.repeats, parsed.seconds)
    fleet = Fleet(
        gateways=parsed.gateways,
        workers=parsed.workers,
        redis=parsed.redis,
        backends=parsed.backends,
        blocks=parsed.blocks,
        memory_entries=parsed.memory_entries,
        redis_entries=parsed.redis_entries,
    )
    options = Options(streamed=parsed.streamed, similar=parsed.similar)
    strategy: StrategyName = parsed.strategy or ("prefix-aware" if trace.has_prefixes else "least-connections")
    try:
        result = simulated(trace, traffic, fleet, figures, options, strategy, parsed.kill)
    except ValueError as error:
        parser.error(str(error))
    workload = Workload.of(result, options.streamed)
    computed = utilisations(result.rate, workload, figures, fleet)
    needs = [needed(rate, workload, figures) for rate in parsed.plan]
    if parsed.json:
        about = {
            "figures": dataclasses.asdict(figures),
            "fleet": dataclasses.asdict(fleet),
            "strategy": strategy,
            "result": {
                **dataclasses.asdict(result),
                "bottleneck": result.bottleneck,
                "saturation": result.saturation,
            },
            "computed": computed,
            "plan": [dataclasses.asdict(need) for need in needs],
        }
        print(json.dumps(about, indent=2))
        return 0
    lines = report_text.report(trace, traffic, fleet, result, computed, parsed.kill)
    print("\n".join([*lines, *(["", *report_text.plan(needs)] if needs else [])]))
    return 0


def simulated(
    trace: Trace,
    traffic: Traffic,
    fleet: Fleet,
    figures: Figures,
    options: Options,
    strategy: StrategyName,
    deaths: Sequence[Death] = (),
) -> Result:
    """What a fleet does with a trace, whose blocks are those of backends. Deterministic. Raises ValueError."""

    shared = PrefixHistory(fleet.blocks)  # through Redis, half a second later

    def make_strategy() -> Strategy:
        if strategy == "power-of-two":
            return PowerOfTwo(_SEED)
        history = shared if fleet.redis else PrefixHistory(fleet.blocks)
        return strategy_of(strategy, RoutingSettings(), history, LoadedModels(lambda: 0.0))

    arrivals = requests(trace, traffic)
    return simulate(
        arrivals, trace.block_tokens, fleet, figures, make_strategy, lambda: LruCache(fleet.blocks), options, deaths
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="keepgate simulate",
        description=_DESCRIPTION,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    load = parser.add_argument_group("load")
    load.add_argument("--trace", metavar="TRACE", type=Path, help="the recorded traffic")
    load.add_argument(
        "--rate", metavar="X", type=_positive, default=1.0, help="how many times as fast as recorded requests come (1)"
    )
    load.add_argument(
        "--copies",
        metavar="N",
        type=_count,
        default=1,
        help="how many such streams there are, each of other prompts (1)",
    )
    load.add_argument(
        "--repeats", metavar="SHARE", type=_share, default=0.0, help="requests that ask again what was asked before (0)"
    )
    load.add_argument("--streamed", metavar="SHARE", type=_share, default=1.0, help="answers that are streams (1)")
    load.add_argument(
        "--similar",
        metavar="SHARE",
        type=_share,
        default=0.0,
        help="requests beyond the exact cache that the semantic cache answers; 0 for none of it (0)",
    )
    load.add_argument(
        "--seconds", metavar="S", type=_positive, default=math.inf, help="how long the load lasts at most (the trace)"
    )
    nodes = parser.add_argument_group("nodes")
    fleet = Fleet()
    nodes.add_argument("--gateways", metavar="N", type=_count, default=fleet.gateways, help="(2)")
    nodes.add_argument("--workers", metavar="N", type=_count, default=fleet.workers, help="processes of each (1)")
    nodes.add_argument(
        "--redis", metavar="N", type=_number, default=fleet.redis, help="Redis nodes, 0 for memory alone (1)"
    )
    nodes.add_argument("--backends", metavar="N", type=_count, default=fleet.backends, help="(4)")
    nodes.add_argument(
        "--blocks",
        metavar="N",
        type=_count,
        default=fleet.blocks,
        help="blocks of at least 512 tokens that the KV cache of one backend holds (5000)",
    )
    nodes.add_argument(
        "--memory-entries",
        metavar="N",
        type=_count,
        default=fleet.memory_entries,
        help="answers in the memory of one worker (100000)",
    )
    nodes.add_argument(
        "--redis-entries",
        metavar="N",
        type=_count,
        default=fleet.redis_entries,
        help="answers in one Redis node (2000000)",
    )
    nodes.add_argument(
        "--strategy", choices=STRATEGIES, help="how backends are chosen (prefix-aware, where prefixes are known)"
    )
    nodes.add_argument(
        "--kill",
        metavar="NODE:N@S",
        type=_death,
        action="append",
        default=[],
        help="a node that dies, such as redis:0@600: gateway, redis or backend, its number from 0, and the second;"
        " may be given again",
    )
    parser.add_argument(
        "--plan", metavar="RATE,…", type=_rates, default=(), help="also what other rates need, in requests a second"
    )
    parser.add_argument("--set", metavar="NAME=NUMBER", action="append", default=[], help="replace a figure")
    parser.add_argument("--figures", action="store_true", help="list the figures with their sources, and nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _positive(text: str) -> float:
    number = _float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number more than 0")
    return number


def _share(text: str) -> float:
    number = _float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return number


def _rates(text: str) -> tuple[float, ...]:
    return tuple(_positive(part.strip()) for part in text.split(","))


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _death(text: str) -> Death:
    found = _DEATH.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not gateway:N@S, redis:N@S or backend:N@S with a number from 0 and seconds"
        )
    return Death(_KINDS[found[1]], int(found[2]), float(found[3]))


if __name__ == "__main__":
    sys.exit(main())
