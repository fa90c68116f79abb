"""What the connector costs vLLM where no prompt repeats."""

import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.prefix.vllm_servers import check_installed, models, served, wait_for_cores
from tests.prefix_store.connectors.vllm_server.server import VllmServer

_ROUNDS, _QUICK_ROUNDS = 7, 1
_REQUESTS, _AT_ONCE, _PROMPT, _ANSWER = 32, 8, 512, 32
_UNTIL_FULL = 3
"""Rounds in which the tiers fill."""
_METHOD = f"""\
vLLM 0.32 for CPUs in bfloat16 on all cores, threads that wait do not spin (OMP_WAIT_POLICY=PASSIVE): {_REQUESTS}
prompts of {_PROMPT} random tokens, new in every round, {_AT_ONCE} at a time, answers of {_ANSWER} tokens; by turns a
server without a connector and one that keeps all blocks in host memory and on disk, which goes first alternates. The
figure is tokens a second with the connector against without, from when the tiers of 1 GiB are full: from then on what
is written replaces something, as in operation."""


async def measure(quick: bool) -> Figure:
    check_installed()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as scratch:
        for number, (name, model) in enumerate(models(Path(scratch), quick).items()):
            rows.append(_measure(name, model, Path(scratch) / f"blocks-{number}", _QUICK_ROUNDS if quick else _ROUNDS))
    return Figure(figure="vllm_cost", title="What the connector costs vLLM", method=_METHOD, rows=tuple(rows))


def _measure(name: str, model: Path, folder: Path, rounds: int) -> Row:
    chance = random.Random(12)  # noqa: S311  # of a measurement
    options = {"memory": "1GiB", "disk": str(folder), "disk_size": "1GiB", "audit": 0}
    ratios: list[float] = []
    beside: list[dict[str, float | str]] = []
    with served(model, None) as plain, served(model, options) as kept:
        servers = {"without": plain, "with": kept}
        for number in range(-_UNTIL_FULL, rounds):
            order = list(servers) if number % 2 else list(reversed(servers))
            rates = {one: _rate(servers[one], chance) for one in order}
            if number >= 0:
                ratios.append(rates["with"] / rates["without"])
                beside.append({f"tokens/s {one}": rate for one, rate in rates.items()})
    return Row(
        what=f"{name}: throughput with the connector against without, nothing repeats",
        unit=RATIO,
        rounds=tuple(ratios),
        target=Target("least", 0.97),
        beside=tuple(beside),
    )


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
