"""The command: measures figures one after the other, saves each as it is there, and writes the report."""

import argparse
import asyncio
import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness.machine import commit, machine, versions
from benchmarks.harness.measurement import (
    FIGURES,
    OPTIONAL_FIGURES,
    RESULTS,
    CannotReport,
    Figure,
    Measurement,
    load,
    save,
)
from benchmarks.harness.processes import CannotMeasure, cores
from benchmarks.harness.regression import regressions
from benchmarks.harness.report import format_row, render, write

# `make bench-gpu` measures that one.
_OPTIONAL = tuple(figure for figure in OPTIONAL_FIGURES if figure != "gpu")
_DESCRIPTION = "Measure Keepgate's figures, each against a reference of the same run."


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 when everything asked for was measured, whether or not it met its target.

    With ``--gate`` 3 when something has become slower than the saved results.
    """
    options = _parser().parse_args(arguments)
    try:
        with contextlib.ExitStack() as stack:
            # What these say is for the terminal only.
            passing = options.quick or options.gate
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if passing else RESULTS
            figures = options.figures or tuple(FIGURES)
            if not options.render:
                asyncio.run(_measure(figures, options.quick, folder))
            if options.gate:
                return _gate(figures, folder)
            if not options.quick:
                write(render(RESULTS))
                _say("Written: docs/benchmarks/")
    except (CannotMeasure, CannotReport) as failure:
        print(f"benchmarks: {failure}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=_DESCRIPTION)
    parser.add_argument(
        "figures",
        nargs="*",
        choices=[*FIGURES, *_OPTIONAL, []],
        metavar="FIGURE",
        help=f"{', '.join(FIGURES)}, all by default; or {', '.join(_OPTIONAL)}, which need other programs",
    )
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few rounds, nothing is kept")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the report anew")
    parser.add_argument(
        "--gate",
        action="store_true",
        help="compare with the saved results and keep nothing: exit status 3 if a ratio has become worse",
    )
    return parser


def _measure_of(figure: str) -> Callable[[bool], Awaitable[Figure]]:
    module = importlib.import_module(f"benchmarks.{(FIGURES | OPTIONAL_FIGURES)[figure]}")
    measure: Callable[[bool], Awaitable[Figure]] = module.measure
    return measure


async def _measure(figures: Sequence[str], quick: bool, folder: Path) -> None:
    measured_at, measured_with = await commit(), versions()
    os.sched_setaffinity(0, cores().load)
    for number, name in enumerate(figures, 1):
        _say(f"[{number}/{len(figures)}] {name} ...")
        about, began = machine(), time.monotonic()
        figure = await _measure_of(name)(quick)
        measurement = Measurement(
            figure=figure,
            date=datetime.now(UTC).date().isoformat(),
            commit=measured_at,
            quick=quick,
            seconds=round(time.monotonic() - began, 1),
            machine=about,
            versions=measured_with,
        )
        for row in figure.rows:
            _say(f"  {format_row(figure, row)}")
        save(measurement, folder)
        _say(f"  took {measurement.seconds:.0f} s")


def _gate(figures: Sequence[str], folder: Path) -> int:
    worse = [line for name in figures for line in regressions(load(name, RESULTS).figure, load(name, folder).figure)]
    for line in worse:
        print(f"benchmarks: worse: {line}", file=sys.stderr)
    _say("Worse than the saved results." if worse else "No ratio is worse than in the saved results.")
    return 3 if worse else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
