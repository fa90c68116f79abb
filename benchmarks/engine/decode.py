"""Decode throughput of the in-repo engine: runs `decode_program.py`, and reads the report it writes."""

import msgspec

from benchmarks.engine import decode_program
from benchmarks.engine.decode_program import TEMPERATURE, TOP_P
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import run_on_all_cores

_MIN_TOKENS_PER_SECOND = {1: 50.0, 8: 300.0, 32: 500.0}
_METHOD = """\
`decode_program.py`: {model} at a context of {context} tokens on {threads} threads, runner {runner}. Whole steps of
the engine (scheduler, model, sampling, detokeniser) and `generate` of transformers take turns on the same weights; the
better of float32 and bfloat16 is what is compared with. Tokens are the most probable ones, or, where the row says so,
drawn at a temperature of {temperature} and a top-p of {top_p}. Of each pair of rows one has to meet its target: tokens
per second are for two Zen 4 cores, the ratio is for any machine."""


class _Batch(msgspec.Struct):
    batch: int
    sampled: bool
    must_reach: float
    keepgate_samples: list[float]
    transformers_float32_tokens_per_second: float
    transformers_bfloat16_tokens_per_second: float


class _Report(msgspec.Struct):
    model: str
    context: int
    threads: int
    runner: str
    rows: list[_Batch]


async def measure(quick: bool) -> Figure:
    words = ["--batches", "1", "--sampled", "--rounds", "2"] if quick else ["--rounds", "5"]
    report = msgspec.json.decode(await run_on_all_cores(decode_program.__name__, *words), type=_Report)
    method = _METHOD.format(
        model=report.model,
        context=report.context,
        threads=report.threads,
        runner=report.runner,
        temperature=TEMPERATURE,
        top_p=TOP_P,
    )
    rows = tuple(row for batch in report.rows for row in _rows(batch))
    return Figure(figure="decode", title="Engine decode", method=method, rows=rows)


def _rows(batch: _Batch) -> tuple[Row, Row]:
    best = max(batch.transformers_float32_tokens_per_second, batch.transformers_bfloat16_tokens_per_second)
    beside = tuple({"transformers generate, tok/s": best} for _ in batch.keepgate_samples)
    name = f"batch {batch.batch}{', sampled' * batch.sampled}"
    least = None if batch.sampled else _MIN_TOKENS_PER_SECOND.get(batch.batch)
    return (
        Row(
            what=name,
            unit="tok/s",
            rounds=tuple(batch.keepgate_samples),
            target=Target("least", least) if least is not None else None,
            either=name,
            beside=beside,
        ),
        Row(
            what=f"{name}, against transformers generate",
            unit=RATIO,
            rounds=tuple(sample / best for sample in batch.keepgate_samples),
            target=Target("least", batch.must_reach),
            either=name,
        ),
    )
