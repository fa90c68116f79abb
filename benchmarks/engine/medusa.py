"""Medusa's heads: trains them on a text, and measures them on what was held out of it (`speculation_program.py`)."""

import tempfile
from pathlib import Path

import msgspec

from benchmarks.engine import speculation_program
from benchmarks.engine.speculation_program import ANSWER, TRAINING_SHARE, Load, Sample, wikitext
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import run_on_all_cores

_TRAIN = "backend.commands.train_medusa"
_METHOD = """\
`keepgate train-medusa` with {answers} answers and {steps} steps trains heads on the first {share:.0%} of
`benchmarks/data/wikitext-2` ({heads} heads; loss {loss:.2f}; of answers that were held out they guess {accuracy} of the
tokens 2, 3, … places on). Then `speculation_program.py`: {model} on {threads} threads, runner {runner}, continues texts
from the rest by {answer} tokens: without drafts, with the heads and what prompt lookup finds, and with prompt lookup
alone, in turn; an answer has to be the same, token for token, or there is no figure."""


class _Trained(msgspec.Struct):
    loss: float
    accuracy: list[float]


class _Load(msgspec.Struct):
    load: Load
    plain: list[Sample]
    drafted: list[Sample]
    looked_up: list[Sample]


class _Report(msgspec.Struct):
    model: str
    threads: int
    runner: str
    loads: list[_Load]


async def measure(quick: bool) -> Figure:
    answers, steps = (32, 50) if quick else (640, 2500)
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as folder:
        text, heads = Path(folder, "text.txt"), Path(folder, "heads")
        _write_training_text(text)
        words = ["default", "--text", str(text), "--out", str(heads), "--json"]
        plan = ["--answers", str(answers), "--steps", str(steps)]
        trained = msgspec.json.decode(await run_on_all_cores(_TRAIN, *words, *plan), type=_Trained)
        rounds = ["--rounds", "1", "--loads", "1"] if quick else ["--rounds", "5"]
        report = msgspec.json.decode(
            await run_on_all_cores(speculation_program.__name__, *rounds, "--medusa", str(heads)), type=_Report
        )
    method = _METHOD.format(
        answers=answers,
        steps=steps,
        share=TRAINING_SHARE,
        heads=len(trained.accuracy),
        loss=trained.loss,
        accuracy=", ".join(f"{share:.0%}" for share in trained.accuracy),
        model=report.model,
        threads=report.threads,
        runner=report.runner,
        answer=ANSWER,
    )
    rows = tuple(row for load in report.loads for row in _rows(load))
    return Figure(figure="medusa", title="Medusa's heads", method=method, rows=rows)


def _write_training_text(file: Path) -> None:
    text = wikitext()
    file.write_text(text[: int(TRAINING_SHARE * len(text))], encoding="utf-8")


def _rows(measured: _Load) -> list[Row]:
    load = measured.load
    is_alone = load.batch == 1
    beside = tuple(
        {
            "tokens per second, without": plain.tokens_per_second,
            "tokens per second": drafted.tokens_per_second,
            "tokens of heads per step and sequence": drafted.accepted_of_heads / drafted.steps / load.batch,
            "accepted of proposed": drafted.accepted / drafted.proposed if drafted.proposed else 0.0,
        }
        for plain, drafted in zip(measured.plain, measured.drafted, strict=True)
    )
    per_step = Row(
        what=f"{load.name}: with heads",
        unit="tokens per step",
        rounds=tuple(sample.tokens / sample.steps / load.batch for sample in measured.drafted),
        target=Target("least", 1.6) if is_alone else None,
    )
    speed = Row(
        what=f"{load.name}: with heads against without drafts",
        unit=RATIO,
        rounds=_ratios(measured.drafted, measured.plain),
        target=Target("least", 1.25 if is_alone else 0.98),
        beside=beside,
    )
    looked_up = Row(
        what=f"{load.name}: with prompt lookup alone against without drafts",
        unit=RATIO,
        rounds=_ratios(measured.looked_up, measured.plain),
    )
    return [per_step, speed, looked_up]


def _ratios(with_drafts: list[Sample], without: list[Sample]) -> tuple[float, ...]:
    pairs = zip(with_drafts, without, strict=True)
    return tuple(one.tokens_per_second / other.tokens_per_second for one, other in pairs)
