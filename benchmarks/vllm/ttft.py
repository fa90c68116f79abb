"""Time to the first token of vLLM on a shared prefix: computed, and restored by the connector from each place."""

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure
from benchmarks.prefix.index import valkey_running
from benchmarks.vllm.servers import check_installed, models, served, wait_for_cores
from tests.compose.monitoring import free_port
from tests.prefix_store.connectors.vllm_server.server import VllmServer

_ROUNDS, _QUICK_ROUNDS = 5, 1
_ATTEMPTS = 4
_PREFIX, _NEW = 1_500, 50
_BLOCK = 32
_CACHED = _PREFIX // _BLOCK * _BLOCK
_METHOD = f"""\
vLLM 0.32 for CPUs in bfloat16 on all cores, threads that wait do not spin (OMP_WAIT_POLICY=PASSIVE), blocks of {_BLOCK}
tokens, its own prefix cache off, one request at a time and a second of rest before each, as vLLM's processes spin so
long: a prefix of {_PREFIX} random tokens that is new in every round and {_NEW} new tokens after it; the time is of a
whole answer of one token, and each is checked to have restored the {_CACHED} tokens of the prefix's whole blocks, or
none. By turns in each round: a writer computes the prefix of the next round (computed) and keeps it, in host memory and
on disk; then it restores the prefix of this round from host memory. A second server that has the same folder restores
it from disk (page cache warm), a third one that has neither from the writer over HTTP on loopback, by way of the index
in Valkey. A fourth one has vLLM's ExampleConnector, which finds whole prompts only: it and the writer get a prompt
twice. After the rounds the second server is started again, and its first prompt is one that it had before. Others do
not run here: vLLM's OffloadingConnector refuses a CPU, its SimpleCPUOffloadConnector copies with CUDA's calls, and
LMCache 0.5.6 has no connector for a CPU."""


async def measure(quick: bool) -> Figure:
    check_installed()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as scratch:
        for number, (name, model) in enumerate(models(Path(scratch), quick).items()):
            (folder := Path(scratch) / f"blocks-{number}").mkdir()
            taken = await _measure(model, folder, _QUICK_ROUNDS if quick else _ROUNDS)
            rows += _rows(name, taken)
    return Figure(figure="vllm_ttft", title="First token of vLLM on a shared prefix", method=_METHOD, rows=tuple(rows))


async def _measure(model: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    chance = random.Random(11)  # noqa: S311  # of a measurement
    taken: dict[str, list[float]] = {}
    missed: list[float] = []
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(valkey_running())
        shared = {"index": url, "secret_file": str(folder / "secret"), "audit": 0}
        disk = {"disk": str(folder / "blocks"), "disk_size": "8GiB"}
        address = {"address": f"http://127.0.0.1:{free_port()}"}

        def start(options: Mapping[str, object], connector: str = "KeepgateConnector") -> VllmServer:
            return stack.enter_context(served(model, options, connector))

        writer = start({"memory": "2GiB", "name": "writer", **disk, **address, **shared})
        other = start({"name": "other", **shared})
        example = start({"shared_storage_path": str(folder / "example")}, "ExampleConnector")
        with ExitStack() as started:
            reader = started.enter_context(served(model, {"name": "reader", **disk, **shared}))
            for server in (writer, reader, other, example):  # every path once
                for _ in range(2):
                    _ask(server, _tokens(chance, 200))
            prefix = _tokens(chance, _PREFIX)
            _ask(writer, prefix + _tokens(chance, _NEW))
            writer.settle()
            for number in range(-1, rounds):
                upcoming = _tokens(chance, _PREFIX)
                missed.append(0.0)
                seconds = {"computed": _timed(writer, chance, upcoming, 0, missed)}
                for name, server in (("memory", writer), ("disk", reader), ("peer", other)):
                    seconds[name] = _timed(server, chance, prefix, _CACHED, missed)
                whole = prefix + _tokens(chance, _NEW)
                for name, server in (("whole", writer), ("example", example)):
                    _ask(server, whole)
                    server.settle()
                    seconds[name] = _ask(server, whole)
                    server.settle()
                last, prefix = prefix, upcoming
                if number >= 0:
                    for name, value in seconds.items():
                        taken.setdefault(name, []).append(value)
        restarted = stack.enter_context(served(model, {"name": "reader", **disk, **shared}))
        taken["restarted"] = [_timed(restarted, chance, last, _CACHED, missed)] * rounds
        taken["missed"] = missed[-rounds:]
    return taken


def _timed(
    server: VllmServer, chance: random.Random, prefix: Sequence[int], restored: int, missed: list[float]
) -> float:
    """Seconds for a prefix and new tokens; again where less was restored, because a place did not answer in time."""
    for _ in range(_ATTEMPTS):
        before = server.restored()
        seconds = _ask(server, [*prefix, *_tokens(chance, _NEW)])
        server.settle()
        if (tokens := server.restored() - before) == restored:
            return seconds
        missed[-1] += 1
    raise CannotMeasure(f"{tokens:g} tokens were restored, expected {restored}: {server.said[-2000:]}")


def _ask(server: VllmServer, prompt: Sequence[int]) -> float:
    wait_for_cores()
    began = time.perf_counter()
    server.complete(prompt, tokens=1)
    return time.perf_counter() - began


def _rows(model: str, taken: Mapping[str, Sequence[float]]) -> list[Row]:
    def row(name: str, what: str, target: Target | None, against: str = "computed") -> Row:
        pairs = list(zip(taken[name], taken[against], strict=True))
        return Row(
            what=f"{model}: {what}",
            unit="",
            rounds=tuple(one / reference for one, reference in pairs),
            target=target,
            beside=tuple({"ms": 1000 * one, f"{against} ms": 1000 * reference} for one, reference in pairs),
        )

    return [
        row("memory", "prefix from host memory, against computing it", Target("most", 1 / 5)),
        row("disk", "prefix from disk, written by another process", Target("most", 1 / 5)),
        row("peer", "prefix from another engine over HTTP", Target("most", 1 / 4)),
        row("restarted", "the first prompt after a restart, from disk, against computing it", Target("most", 1)),
        Row(
            what=f"{model}: restores in which a place did not answer in time, a round of three",
            unit="",
            rounds=tuple(taken["missed"]),
            target=None,
        ),
        row("whole", "a whole prompt again, against vLLM's ExampleConnector", Target("most", 1), "example"),
    ]


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1_000, 40_000) for _ in range(count)]
