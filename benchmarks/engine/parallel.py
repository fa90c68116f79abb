"""Two ranks beside one: runs `parallel_program.py` for both divisions, and reads the reports it writes."""

import msgspec

from benchmarks.engine import parallel_program
from benchmarks.engine.parallel_program import HIDDEN, INNER, LAYERS, PAIRS
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import run_on_all_cores

_LEAST = 1.5
_METHOD = f"""\
`parallel_program.py`: a Llama with random weights in float32, {LAYERS} layers of hidden size {HIDDEN} and {INNER} inner
features, as TinyLlama 1.1B has them. Whole steps on two ranks, each on a core of its own, and on one rank on one core
take turns; a round is the median ratio of {PAIRS} pairs. Ranks exchange by shared memory and gloo. Decodes are at a
context of 128 tokens. A pipeline computes a step of few rows in one stage after the other: only steps of 32 rows and
more are divided into micro-batches."""


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
    words = ("--division", division, "--rounds", str(rounds))
    return msgspec.json.decode(await run_on_all_cores(parallel_program.__name__, *words), type=list[_Steps])


def _row(division: str, steps: _Steps, target: Target | None) -> Row:
    beside = tuple({"one rank, ms a step": 1000 * seconds} for seconds in steps.seconds)
    what = f"{division}, {steps.what}, against one rank"
    return Row(what=what, unit=RATIO, rounds=tuple(steps.ratios), target=target, beside=beside)
