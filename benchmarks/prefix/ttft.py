"""Time to the first token on a shared prefix: computed, in the engine's memory, and restored from each place."""

import random
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure
from benchmarks.prefix.engines import Answer, prefix_engine
from benchmarks.prefix.index import valkey_running

_ROUNDS, _QUICK_ROUNDS = 15, 2
_PREFIX, _NEW = 1_500, 50
_BLOCK = 16
_CACHED = _PREFIX // _BLOCK * _BLOCK
_BLOCKS = (_PREFIX + _NEW) // _BLOCK
_BLOCK_BYTES = 368_640
_VOCABULARY = range(100, 40_000)
# Room for one prompt and a little: what comes next takes the blocks of what was before.
_SMALL_POOL = f"--kv-memory={112 * _BLOCK_BYTES}"
_METHOD = f"""\
SmolLM2-135M in float16 on all cores, one request at a time: a prefix of {_PREFIX} random tokens that is new in every
round and {_NEW} new tokens after it, streamed; the time is until the first token, and each answer's header is checked
to say that {_CACHED} tokens of the prefix (its whole blocks) were not computed, or none. By turns in each round: a
writer computes the prefix of the next round (cold) and keeps it, in host memory and on disk. Its own blocks have room
for one prompt, so then it restores the prefix of this round from host memory; a second process that has the same folder
restores it from disk (page cache warm); a third one that has neither asks the writer for it over HTTP on loopback, by
way of the index in Valkey. Last it is asked of the third one again, which has it in its own blocks now."""


async def measure(quick: bool) -> Figure:
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    chance = random.Random(11)  # noqa: S311  # of a measurement
    taken: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepgate-bench-")))
        url = await stack.enter_async_context(valkey_running())
        shared = (f"--prefix-index={url}", f"--prefix-secret-file={folder / 'secret'}", "--prefix-audit=0")
        disk = f"--prefix-disk={folder / 'blocks'}"
        writer = await stack.enter_async_context(
            prefix_engine("--prefix-memory=2GiB", disk, "--prefix-name=writer", _SMALL_POOL, *shared)
        )
        reader = await stack.enter_async_context(prefix_engine(disk, "--prefix-name=reader", _SMALL_POOL, *shared))
        other = await stack.enter_async_context(prefix_engine("--prefix-name=other", *shared))
        for engine in (writer, reader, other):  # every path once, so that nothing is imported or bound later
            await engine.ask(_tokens(chance, _PREFIX + _NEW))
        prefix = _tokens(chance, _PREFIX)
        await writer.ask(prefix + _tokens(chance, _NEW))
        kept = 2 * _BLOCKS
        await writer.until_kept(kept, "memory", "disk")
        for number in range(-1, rounds):
            upcoming = _tokens(chance, _PREFIX)
            answers = {"cold": await writer.ask(upcoming + _tokens(chance, _NEW))}
            kept += _BLOCKS
            await writer.until_kept(kept, "memory", "disk")
            for name, engine in (("memory", writer), ("disk", reader), ("peer", other), ("device", other)):
                answers[name] = await engine.ask(prefix + _tokens(chance, _NEW))
            if number >= 0:
                _check(answers)
                for name, answer in answers.items():
                    taken.setdefault(name, []).append(answer.seconds)
            prefix = upcoming
    return Figure(figure="prefix_ttft", title="First token on a shared prefix", method=_METHOD, rows=_rows(taken))


def _check(answers: Mapping[str, Answer]) -> None:
    for name, answer in answers.items():
        expected = 0 if name == "cold" else _CACHED
        if answer.cached != expected:
            raise CannotMeasure(f"{name}: {answer.cached} tokens were not computed, expected {expected}")


def _rows(taken: Mapping[str, list[float]]) -> tuple[Row, ...]:
    def row(name: str, what: str, target: Target | None) -> Row:
        pairs = list(zip(taken[name], taken["cold"], strict=True))
        return Row(
            what=f"{what}, against computing it",
            unit="",
            rounds=tuple(warm / cold for warm, cold in pairs),
            target=target,
            beside=tuple({"ms": 1000 * warm, "computed ms": 1000 * cold} for warm, cold in pairs),
        )

    return (
        row("memory", "prefix from host memory", Target("most", 1 / 8)),
        row("disk", "prefix from disk, written by another process", Target("most", 1 / 5)),
        row("peer", "prefix from another engine over HTTP", Target("most", 1 / 5)),
        row("device", "prefix in the engine's own blocks", None),
    )


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.choice(_VOCABULARY) for _ in range(count)]
