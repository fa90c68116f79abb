"""What the connector costs vLLM where no prompt repeats."""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.vllm.servers import check_installed, models, served, wait_for_cores
from tests.prefix_store.connectors.vllm_server.server import VllmServer

_ROUNDS, _QUICK_ROUNDS = 8, 1
_SERVERS = 2
"""Of each kind."""
_REQUESTS, _AT_ONCE, _PROMPT, _ANSWER = 16, 8, 512, 32
_UNTIL_FULL = 6
"""Rounds in which the tiers fill."""
_METHOD = f"""\
vLLM 0.32 for CPUs in bfloat16 on all cores, threads that wait do not spin (OMP_WAIT_POLICY=PASSIVE): {_REQUESTS}
prompts of {_PROMPT} random tokens, new in every round, {_AT_ONCE} at a time, answers of {_ANSWER} tokens; by turns, in
random order, two servers without a connector and two that keep all blocks in host memory and on disk. The figure is the
mean of the tokens a second with the connector against without, from when the tiers of 1 GiB are full: from then on what
is written replaces something, as in operation. What two servers without a connector differ by says how exact it is."""


async def measure(quick: bool) -> Figure:
    check_installed()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as scratch:
        for number, (name, model) in enumerate(models(Path(scratch), quick).items()):
            rows += _measure(name, model, Path(scratch) / f"blocks-{number}", _QUICK_ROUNDS if quick else _ROUNDS)
    return Figure(figure="vllm_cost", title="What the connector costs vLLM", method=_METHOD, rows=tuple(rows))


def _measure(name: str, model: Path, folder: Path, rounds: int) -> list[Row]:
    chance = random.Random(12)  # noqa: S311  # of a measurement
    costs: list[float] = []
    differences: list[float] = []
    beside: list[dict[str, float | str]] = []
    with ExitStack() as running:
        servers: dict[str, VllmServer] = {}
        for number in range(_SERVERS):
            options = {"memory": "1GiB", "disk": str(folder / f"{number}"), "disk_size": "1GiB", "audit": 0}
            servers[f"without {number}"] = running.enter_context(served(model, None))
            servers[f"with {number}"] = running.enter_context(served(model, options))
        for number in range(-_UNTIL_FULL, rounds):
            # Those without a connector have nothing to fill, and warm up in the last of these rounds.
            asked = [one for one in sorted(servers) if number >= -1 or one.startswith("with ")]
            order = chance.sample(asked, len(asked))
            rates = {one: _rate(servers[one], chance) for one in order}
            if number >= 0:
                without, kept = ([rates[f"{kind} {n}"] for n in range(_SERVERS)] for kind in ("without", "with"))
                costs.append(statistics.mean(kept) / statistics.mean(without))
                differences.append(without[1] / without[0])
                beside.append({f"tokens/s {one}": rates[one] for one in sorted(rates)})
    return [
        _row(f"{name}: throughput with the connector against without, nothing repeats", costs, beside, 0.97),
        _row(f"{name}: throughput of one server without the connector against the other", differences),
    ]


def _row(
    what: str, ratios: Sequence[float], beside: Sequence[dict[str, float | str]] = (), least: float | None = None
) -> Row:
    target = None if least is None else Target("least", least)
    return Row(what=what, unit=RATIO, rounds=tuple(ratios), target=target, beside=tuple(beside))


def _rate(server: VllmServer, chance: random.Random) -> float:
    """Tokens a second, of prompts and answers."""
    prompts = [[chance.randrange(1_000, 40_000) for _ in range(_PROMPT)] for _ in range(_REQUESTS)]
    wait_for_cores()
    began = time.perf_counter()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(lambda prompt: server.complete(prompt, tokens=_ANSWER), prompts))
    seconds = time.perf_counter() - began
    server.settle()
    return _REQUESTS * (_PROMPT + _ANSWER) / seconds
