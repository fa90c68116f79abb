"""What keeping prefixes costs the steps of an engine that never restores one."""

import asyncio
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.prefix.engines import PrefixEngine, prefix_engine

_ROUNDS, _QUICK_ROUNDS = 11, 1
_VOCABULARY = range(100, 40_000)
_COUNT, _SUM = ("keepgate_backend_step_seconds_count", ""), ("keepgate_backend_step_seconds_sum", "")


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests at a time, each with so many tokens in prompt and answer."""

    name: str
    requests: int
    prompt: int
    answer: int


_LOADS = (Load("chats", 4, 200, 40), Load("long answers", 4, 48, 80), Load("prompts alone", 1, 900, 1))
_METHOD = """\
Two engines with SmolLM2-135M in float16 on all cores, one of which keeps everything it computes in host memory and on
disk, behind the steps; the other has no prefix store. They get the same load by turns, in changing order, every prompt
of it new, and the figure is the mean time of a step, as each engine measures it, of the one over that of the other.
Chats: four at a time, 200 tokens of prompt and 40 of answer. Long answers: four at a time, 48 and 80. Prompts alone:
one at a time, 900 tokens and one, which is all there is to write and nothing but work for the cores."""


async def measure(quick: bool) -> Figure:
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    chance = random.Random(12)  # noqa: S311  # of a measurement
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as folder:
        keeping = (f"--prefix-disk={Path(folder, 'blocks')}", "--prefix-disk-size=8GiB", "--prefix-memory=1GiB")
        async with prefix_engine(*keeping) as on, prefix_engine() as off:
            rows = [await _row(on, off, chance, rounds, load) for load in _LOADS]
    return Figure(figure="prefix_steps", title="Keeping prefixes behind the steps", method=_METHOD, rows=tuple(rows))


async def _row(on: PrefixEngine, off: PrefixEngine, chance: random.Random, rounds: int, load: Load) -> Row:
    ratios, beside = [], []
    for number in range(-1, rounds):
        prompts = [[chance.choice(_VOCABULARY) for _ in range(load.prompt)] for _ in range(load.requests)]
        order = ((on, off), (off, on))[number % 2]
        seconds = {engine: await _step_seconds(engine, prompts, load.answer) for engine in order}
        if number >= 0:  # before that, everything is used for the first time
            ratios.append(seconds[on] / seconds[off])
            beside.append({"ms": 1000 * seconds[on], "without ms": 1000 * seconds[off]})
    return Row(
        what=f"mean step with keeping, against without: {load.name}",
        unit=RATIO,
        rounds=tuple(ratios),
        target=Target("most", 1.03),
        beside=tuple(beside),
    )


async def _step_seconds(engine: PrefixEngine, prompts: list[list[int]], told: int) -> float:
    before = await engine.samples()
    await asyncio.gather(*(engine.ask(prompt, told) for prompt in prompts))
    after = await engine.samples()
    return (after[_SUM] - before[_SUM]) / (after[_COUNT] - before[_COUNT])
