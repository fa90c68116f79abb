"""The command `keepgate eval-pairs`. Light until its arguments and its file are known to be right."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cache.semantic.embedding.model_files import models_folder
from cache.semantic.evaluation.pairs import PairsError, read_pairs

_DESCRIPTION = """\
Show what the semantic cache would do on labelled pairs of prompts. Of each pair, text_a is cached and text_b is asked.
FILE.csv is UTF-8 with a header line that names the columns text_a, text_b and label; label is 1 or true where the
answer to text_a is right for text_b, else 0 or false. Other columns are ignored."""

_NOTES = """\
The policy of the live cache learns from audits and from misses near a neighbour. A file has no traffic: here each pair
is judged by what was learned from the labels of other pairs (5 parts, always the same division).

examples:
  keepgate eval-pairs pairs.csv
  keepgate eval-pairs pairs.csv --delta 0.005 --json"""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where the options are listed."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    """Run the command; returns the exit status: 2 where an argument or the file is wrong, 1 where the model is."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parsed = _parser().parse_args()
    try:
        pairs = read_pairs(parsed.file)
    except PairsError as error:
        print(f"keepgate eval-pairs: {error}", file=sys.stderr)
        return 2
    # One thread, as the semantic cache has: the figures of time are those of one core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from cache.semantic.embedding.errors import EmbeddingError
    from cache.semantic.embedding.load import load_encoder
    from cache.semantic.evaluation.report import format_report, report_on
    from cache.semantic.evaluation.verdicts import verdicts_of

    try:
        encoder = load_encoder(parsed.model, models_folder())
    except EmbeddingError as error:
        print(f"keepgate eval-pairs: {error}", file=sys.stderr)
        return 1
    verdicts = verdicts_of(pairs, encoder, _progress(len(pairs)))
    report = report_on(str(parsed.file), pairs, verdicts, encoder.name, parsed.delta)
    print(json.dumps(report, indent=2) if parsed.json else format_report(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="keepgate eval-pairs",
        description=_DESCRIPTION,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE.csv", type=Path, help="the pairs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--delta", metavar="SHARE", type=_delta, default=0.01, help="wrong answers per request that are allowed (0.01)"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        default="default",
        help="a sentence-transformers model by name or path (all-MiniLM-L6-v2, which ships as a package)",
    )
    return parser


def _delta(written: str) -> float:
    try:
        delta = float(written)
    except ValueError:
        delta = -1.0
    if not 0.0 < delta < 1.0:
        raise argparse.ArgumentTypeError(f"{written!r} is no share; it must be above 0 and below 1, such as 0.01")
    return delta


def _progress(pairs: int) -> Callable[[int], None]:
    """Shows on a terminal how far it is."""

    def show(done: int) -> None:
        if sys.stderr.isatty():
            end = "\r" if done < pairs else "\n"
            print(f"{done} of {pairs} pairs", end=end, file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
