"""Two ranks beside one: runs `parallel_program.py` for both divisions, and reads the reports it writes."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.engine.parallel_program import HIDDEN, INNER, LAYERS, PAIRS
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import ROOT, CannotMeasure, cores

_LEAST = 1.5
_METHOD = f"""\
`parallel_program.py`: a Llama with random weights in float32, {LAYERS} layers of hidden size {HIDDEN} and {INNER} inner
features, as TinyLlama 1.1B has them. Whole steps on two ranks, each on a core of its own, and on one rank on one core
take turns; a round is the median ratio of {PAIRS} pairs. Ranks exchange over gloo. Decodes are at a context of 128
tokens. A pipeline computes a step of few rows in one stage after the other: only steps of 32 rows and more are divided
into micro-batches."""


class _Steps(msgspec.Struct):
    what: str
    seconds: list[float]
    ratios: list[float]


async def measure(quick: bool) -> Figure:
    rounds = 1 if quick else 3
    tensor, pipeline = await _run("tensor", rounds), await _run("pipeline", rounds)
    rows = [_row("tensor parallel 2", steps, Target("least", _LEAST)) for steps in tensor]
    rows += [_row("pipeline parallel 2", steps, None) for steps in pipeline]
    return Figure(figure="parallel", title="Two ranks", method=_METHOD, rows=tuple(rows))


async def _run(division: str, rounds: int) -> list[_Steps]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "parallel.json")
        words = ("--division", division, "--rounds", str(rounds), "--out", str(out))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.engine.parallel_program", *words),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores().all),
        )
        said, _ = await process.communicate()
        if process.returncode:
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            raise CannotMeasure(f"parallel_program.py ended with status {process.returncode}: {''.join(last)}")
        written = await asyncio.to_thread(out.read_bytes)
        return msgspec.json.decode(written, type=list[_Steps])


def _row(division: str, steps: _Steps, target: Target | None) -> Row:
    beside = tuple({"one rank, ms a step": 1000 * seconds} for seconds in steps.seconds)
    what = f"{division}, {steps.what}, against one rank"
    return Row(what=what, unit=RATIO, rounds=tuple(steps.ratios), target=target, beside=beside)
