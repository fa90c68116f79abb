"""Compare this checkout with another one: `python -m benchmarks.compare ../keepgate-before`.

Both are measured in turn, A B A B, in one run, so that the load of the machine concerns both. The other checkout needs
`make install`. Where servers can be driven from outside, both run at the same time and take turns; else each checkout
runs its own quick figure. A ratio above 1 is an improvement; exit status 3 if one is below .98 by more than its spread.
"""

import argparse
import asyncio
import contextlib
import gzip
import itertools
import os
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import msgspec

from benchmarks.engine.completions import complete
from benchmarks.gateway.relay_cpu import cpu_per_chunk
from benchmarks.harness import request_bodies as bodies
from benchmarks.harness.client import post
from benchmarks.harness.measurement import RESULTS
from benchmarks.harness.processes import ROOT, CannotMeasure, Server, cores, free_port, run_program, server, upstream
from benchmarks.harness.wrk import DistinctRequests, load, same_request

_MIN_RATIO = 0.98
_DESCRIPTION = "Measure this checkout and another one in turn, and print the ratios."
_MODEL = "SmolLM2-135M-Instruct"
_START_SECONDS = 300.0
# Runs a figure in whichever checkout is the current directory, and writes the medians of its rows as JSON.
_FIGURE = """
import asyncio, importlib, json, os, statistics, sys
try:
    from benchmarks.harness.measurement import FIGURES
    from benchmarks.harness.processes import cores
except ImportError:
    from benchmarks.figure import FIGURES
    from benchmarks.processes import cores
os.sched_setaffinity(0, cores().load)
figures = FIGURES if isinstance(FIGURES, dict) else {name: name for name in FIGURES}
figure = asyncio.run(importlib.import_module("benchmarks." + figures[sys.argv[1]]).measure(True))
print(json.dumps({row.what: statistics.median(row.rounds) for row in figure.rows}))
"""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout, and the Python of its environment."""

    path: Path
    python: str

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.path)}


@dataclass(slots=True)
class Comparison:
    """A figure of both checkouts, round by round; `higher` says whether more is better."""

    what: str
    unit: str
    higher: bool
    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Of each round; above 1 where the new one is better."""
        pairs = zip(self.old, self.new, strict=True)
        return [new / old if self.higher else old / new for old, new in pairs]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_worse(self) -> bool:
        """Below the limit, by more than the standard error of the median."""
        error = 1.25 * statistics.stdev(self.ratios) / len(self.ratios) ** 0.5 if len(self.ratios) > 1 else 0.0
        return self.ratio + error < _MIN_RATIO


Measure = Callable[[Checkout], Awaitable[float]]


async def take_turns(comparison: Comparison, old: Checkout, new: Checkout, measure: Measure, rounds: int) -> Comparison:
    """Measure both in each round, by turns in either order."""
    for number in range(rounds):
        for checkout in (old, new) if number % 2 else (new, old):
            (comparison.old if checkout is old else comparison.new).append(await measure(checkout))
    return comparison


@asynccontextmanager
async def gateways(old: Checkout, new: Checkout, url: str) -> AsyncIterator[dict[Path, Server]]:
    """A gateway of each checkout, with an embedded store, on the subject's core."""
    async with contextlib.AsyncExitStack() as stack:
        servers: dict[Path, Server] = {}
        for checkout in (old, new):
            port = free_port()
            state = stack.enter_context(TemporaryDirectory(prefix="keepgate-bench-"))
            command = [checkout.python, "-m", "gateway", "serve", "--port", str(port), "--upstream", url]
            environment = {**checkout.environment, "KEEPGATE_STATE_DIR": state, "KEEPGATE_LOG_LEVEL": "error"}
            started = await stack.enter_async_context(
                server(command, port, cores().subject, environment, cwd=checkout.path)
            )
            for child in started.children():
                os.sched_setaffinity(child, cores().load)
            servers[checkout.path] = started
        yield servers


@asynccontextmanager
async def backends(old: Checkout, new: Checkout) -> AsyncIterator[dict[Path, Server]]:
    """A decode engine of each checkout, on all cores."""
    async with contextlib.AsyncExitStack() as stack:
        servers: dict[Path, Server] = {}
        for checkout in (old, new):
            port = free_port()
            command = [checkout.python, "-m", "backend", "--port", str(port), "--no-prefix-sharing"]
            servers[checkout.path] = await stack.enter_async_context(
                server(command, port, cores().all, checkout.environment, _START_SECONDS, cwd=checkout.path)
            )
            await _until_ready(servers[checkout.path])
        yield servers


async def exact_hits(old: Checkout, new: Checkout, rounds: int) -> list[Comparison]:
    """Hits per second of one worker on one core, 32 connections."""
    found: list[Comparison] = []
    with TemporaryDirectory() as folder:
        body = Path(folder, "body")
        async with upstream() as origin, gateways(old, new, origin.url) as servers:
            for what, content in (("300 B", bodies.chat()), ("26 KB", bodies.chat_with_tools())):
                await asyncio.to_thread(body.write_bytes, content)
                for one in servers.values():
                    for _ in range(2):
                        await post(one, content)

                async def hits(checkout: Checkout) -> float:
                    run = await load(servers[checkout.path], same_request(body), connections=32, seconds=2)
                    return run.per_second

                comparison = Comparison(f"exact hits, chat of {what}", "per second", higher=True)
                found.append(await take_turns(comparison, old, new, hits, rounds))
    return found


async def miss_latency(old: Checkout, new: Checkout, rounds: int) -> list[Comparison]:
    """Latency on a miss of an upstream that takes 50 ms, and CPU time of the gateway."""
    requests = DistinctRequests(bodies.distinct_parts())
    cpu = Comparison("CPU per miss", "µs", higher=False)
    async with upstream(service_time=0.05) as origin, gateways(old, new, origin.url) as servers:

        async def added(checkout: Checkout) -> float:
            script = requests.script(60_000, 0.1)
            direct = await load(origin, script, connections=32, seconds=2)
            run = await load(servers[checkout.path], requests.script(60_000, 0.1), connections=32, seconds=3)
            (cpu.old if checkout is old else cpu.new).append(run.cpu_per_request * 1e6)
            return (run.p50 - direct.p50) * 1e3

        await added(old), await added(new)
        cpu.old, cpu.new = [], []
        comparison = Comparison("latency added on a miss, p50", "ms", higher=False)
        return [await take_turns(comparison, old, new, added, rounds), cpu]


async def relay(old: Checkout, new: Checkout, rounds: int) -> list[Comparison]:
    """CPU time of the gateway per relayed chunk."""
    chunks = 1_000
    async with upstream(chunks=chunks, pause=0.002) as origin, gateways(old, new, origin.url) as servers:
        numbers = iter(range(10_000))

        async def micros(checkout: Checkout) -> float:
            return await cpu_per_chunk(servers[checkout.path], f"turn {next(numbers)}", chunks)

        await micros(old), await micros(new)
        return [await take_turns(Comparison("relayed chunk, CPU", "µs", higher=False), old, new, micros, rounds)]


async def decode(old: Checkout, new: Checkout, rounds: int) -> list[Comparison]:
    """Tokens per second of streams that decode together, through the engine's HTTP server."""
    found: list[Comparison] = []
    async with backends(old, new) as servers, aiohttp.ClientSession() as session:
        for batch in (1, 8, 32):

            async def rate(checkout: Checkout, batch: int = batch) -> float:
                url, tokens = servers[checkout.path].url, 96 if batch == 1 else 64
                prompts = [f"Stream {number} tells of a long journey." for number in range(batch)]
                done = await asyncio.gather(*(complete(session, url, _MODEL, prompt, tokens) for prompt in prompts))
                begin, end = max(one.first for one in done), min(one.last for one in done)
                return sum(one.tokens_between(begin, end) for one in done) / (end - begin)

            await rate(old), await rate(new)
            comparison = Comparison(f"decode, batch {batch}", "tokens/s", higher=True)
            found.append(await take_turns(comparison, old, new, rate, rounds))
    return found


def of_figure(figure: str, rows: Sequence[tuple[str, str, str, bool]], rounds: int) -> "Part":
    """A comparison of rows of a figure that each checkout measures by itself: row, name here, unit, whether higher."""

    async def compare(old: Checkout, new: Checkout, _: int) -> list[Comparison]:
        comparisons = {row: Comparison(what, unit, higher) for row, what, unit, higher in rows}
        for number in range(rounds):
            for checkout in (old, new) if number % 2 else (new, old):
                command = (checkout.python, "-c", _FIGURE, figure)
                output = await run_program(figure, command, cores().all, checkout.environment, checkout.path)
                measured: dict[str, float] = msgspec.json.decode(output.splitlines()[-1])
                for row, comparison in comparisons.items():
                    (comparison.old if checkout is old else comparison.new).append(measured[row])
        return list(comparisons.values())

    return compare


async def replays(old: Checkout, new: Checkout, _: int) -> list[Comparison]:
    """`keepgate replay` of the first lines of both traces: hit ratios, and how long it takes."""
    found: list[Comparison] = []
    with TemporaryDirectory() as folder:
        for name, lines in (("mooncake_conversation", 3_000), ("coding_agent", 40)):
            trace = Path(folder, f"{name}.jsonl")
            whole = ROOT / "benchmarks" / "data" / "traces" / f"{name}.jsonl.gz"
            await asyncio.to_thread(_cut, whole, lines, trace)
            ratios = Comparison(f"replay of {name}", "sum of hit ratios", higher=True)

            async def seconds(checkout: Checkout, trace: Path = trace, ratios: Comparison = ratios) -> float:
                command = (checkout.python, "-m", "prefix_store.replay", str(trace), "--capacity", "2000", "--json")
                began = time.perf_counter()
                output = await run_program(
                    "keepgate replay", command, cores().subject, checkout.environment, checkout.path
                )
                took = time.perf_counter() - began
                shares = re.findall(rb'"block_hit_ratio": ([0-9.]+)', output)
                (ratios.old if checkout is old else ratios.new).append(sum(map(float, shares)))
                return took

            found += [
                await take_turns(Comparison(f"replay of {name}", "s", higher=False), old, new, seconds, 5),
                ratios,
            ]
    return found


def _cut(whole: Path, lines: int, part: Path) -> None:
    with gzip.open(whole) as file:
        part.write_bytes(b"".join(itertools.islice(file, lines)))


async def help_seconds(old: Checkout, new: Checkout, rounds: int) -> list[Comparison]:
    """`keepgate --help`, from start to end."""

    async def seconds(checkout: Checkout) -> float:
        command = (checkout.python, "-m", "gateway", "--help")
        began = time.perf_counter()
        await run_program("keepgate --help", command, cores().all, checkout.environment, checkout.path)
        return time.perf_counter() - began

    comparison = Comparison("keepgate --help", "s", higher=False)
    return [await take_turns(comparison, old, new, seconds, 2 * rounds)]


Part = Callable[[Checkout, Checkout, int], Awaitable[list[Comparison]]]
PARTS: dict[str, Part] = {
    "help": help_seconds,
    "exact_hits": exact_hits,
    "miss_latency": miss_latency,
    "relay": relay,
    "decode": decode,
    "prefix_index": of_figure(
        "prefix_index",
        [("1,000-block prompt, 700 present: one lookup, p50", "index lookup of 1,000 blocks, p50", "ms", False)],
        rounds=7,
    ),
    "prefix_ttft": of_figure(
        "prefix_ttft",
        [
            (
                f"prefix from {place}, against computing it",
                f"first token, prefix from {short}",
                "of computing it",
                False,
            )
            for place, short in (("host memory", "host memory"), ("disk, written by another process", "disk"))
        ],
        rounds=7,
    ),
    "prefix_replay": replays,
    "semantic_latency": of_figure(
        "semantic_latency",
        [
            (
                "1,000 entries in one partition: embed, search, compare, p50",
                "semantic look-up, 1,000 entries, p50",
                "ms",
                False,
            )
        ],
        rounds=5,
    ),
}


async def _until_ready(one: Server) -> None:
    async with asyncio.timeout(_START_SECONDS), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{one.url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)


def _lines(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for one in comparisons:
        old, new = statistics.median(one.old), statistics.median(one.new)
        spread = f"{min(one.ratios):.3f} to {max(one.ratios):.3f}"
        verdict = "worse" if one.is_worse else ""
        yield f"{one.what:44} {old:10.4g} {new:10.4g} {one.unit:16} {one.ratio:6.3f}  ({spread}) {verdict}"


async def _compare(old: Checkout, new: Checkout, parts: Sequence[str], rounds: int) -> list[Comparison]:
    found: list[Comparison] = []
    for part in parts:
        compared = await PARTS[part](old, new, rounds)
        found += compared
        for line in _lines(compared):
            print(line, flush=True)
    return found


def main() -> int:
    """Returns the exit status: 0, 1 where nothing could be measured, 3 where something is worse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=_DESCRIPTION)
    parser.add_argument("old", type=Path, help="another checkout of this repository, in which make install was run")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"{', '.join(PARTS)}; or all")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    path = options.old.resolve()
    python = path / ".venv" / "bin" / "python"
    if not python.exists():
        parser.error(f"{path} has no .venv/bin/python: run make install there")
    old, new = Checkout(path, str(python)), Checkout(ROOT, sys.executable)
    os.sched_setaffinity(0, cores().load)
    try:
        found = asyncio.run(_compare(old, new, options.parts or list(PARTS), options.rounds))
    except CannotMeasure as failure:
        print(f"benchmarks: {failure}", file=sys.stderr)
        return 1
    if not options.parts:
        (RESULTS / "compare.json").write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return 3 if any(one.is_worse for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
