"""Decode throughput with drafts against without: runs `speculation_program.py`, and reads the report it writes."""

import msgspec

from benchmarks.engine import speculation_program
from benchmarks.engine.speculation_program import ANSWER, Load, Sample
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import run_on_all_cores

_METHOD = """\
`speculation_program.py`: {model} on {threads} threads, runner {runner}; whole steps of the engine. The same prompts
are answered with {answer} tokens without drafts and with them, in turn; an answer has to be the same, token for token,
or there is no figure. Steps of 1, 2, 4, 8, 16 and 32 rows take {steps} ms. What is predicted is the answer with one
token of 25 changed, as of a document that the answer edits."""
_TARGETS = {
    "prompt lookup, code repeated with a change, batch 1": 1.6,
    "prompt lookup, documents summarised, batch 1": 1.6,
    "predicted output, one token of 25 is another, batch 1": 2.0,
}
_NEVER_SLOWER = 0.98


class _Load(msgspec.Struct):
    load: Load
    plain: list[Sample]
    drafted: list[Sample]


class _Report(msgspec.Struct):
    model: str
    threads: int
    runner: str
    step_ms: dict[str, float]
    loads: list[_Load]


async def measure(quick: bool) -> Figure:
    words = ["--rounds", "1", "--loads", "1"] if quick else ["--rounds", "5"]
    report = msgspec.json.decode(await run_on_all_cores(speculation_program.__name__, *words), type=_Report)
    method = _METHOD.format(
        model=report.model,
        threads=report.threads,
        runner=report.runner,
        answer=ANSWER,
        steps=", ".join(f"{milliseconds:.3g}" for milliseconds in report.step_ms.values()),
    )
    return Figure(
        figure="speculation", title="Speculative decoding", method=method, rows=tuple(map(_row, report.loads))
    )


def _row(measured: _Load) -> Row:
    pairs = list(zip(measured.plain, measured.drafted, strict=True))
    return Row(
        what=measured.load.name,
        unit=RATIO,
        rounds=tuple(drafted.tokens_per_second / plain.tokens_per_second for plain, drafted in pairs),
        target=Target("least", _TARGETS.get(measured.load.name, _NEVER_SLOWER)),
        beside=tuple(
            {
                "tokens per second, without": plain.tokens_per_second,
                "tokens per second": drafted.tokens_per_second,
                "tokens per step and sequence": drafted.tokens / drafted.steps / measured.load.batch,
                "accepted of proposed": drafted.accepted / drafted.proposed if drafted.proposed else 0.0,
            }
            for plain, drafted in pairs
        ),
    )
