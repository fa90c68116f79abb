"""The command `keepgate eval-pairs`. Light until its arguments and its file are known to be right."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from cache.semantic.embedding.model_files import models_folder
from cache.semantic.evaluation.pairs import COLUMNS as PAIRS
from cache.semantic.evaluation.pairs import LabelledPair, pairs_of
from cache.semantic.evaluation.rows import UnreadableFile, read_rows
from cache.semantic.evaluation.streams.reading import COLUMNS as STREAM
from cache.semantic.evaluation.streams.reading import AskedQuestion, StreamOptions, stream_of

_DESCRIPTION = """\
Show what the semantic cache would do on labelled pairs of prompts, or on a stream of questions.
FILE is a CSV in UTF-8 with a header line, or JSON Lines (.jsonl). Other columns than these are ignored:
  pairs    text_a, text_b, label          text_a is cached and text_b is asked; label is 1 or true where the answer to
                                          text_a is right for text_b, else 0 or false
  stream   question, answer_id, [lang]    in the order in which they were asked; questions with one answer_id have the
                                          same right answer"""

_NOTES = """\
Pairs have no traffic: each is judged by what was learned from the labels of other pairs (5 parts, always the same
division). A stream is asked as the live cache would be: the policy starts without knowledge, learns from misses near a
neighbour and from audits, and serves when it is sure enough. What says whether two answers are the same is simulated
there: it errs as often as --judge-recall and --judge-false-same say, and the policy knows that.

examples:
  keepgate eval-pairs pairs.csv
  keepgate eval-pairs pairs.csv --delta 0.005 --json
  keepgate eval-pairs log.jsonl
  keepgate eval-pairs log.csv --orders 10 --judge-recall 0.95"""

_RECALL, _FALSE_SAME = 0.98, 0.01


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where the options are listed."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    """Run the command; returns the exit status: 2 where an argument or the file is wrong, 1 where the model is."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    commands = parser()
    parsed = commands.parse_args()
    pairs: list[LabelledPair] = []
    stream: list[AskedQuestion] = []
    try:
        rows = read_rows(parsed.file, [PAIRS, STREAM])
        if rows.columns == STREAM:
            stream = stream_of(rows)
        else:
            pairs = pairs_of(rows)
    except UnreadableFile as error:
        print(f"keepgate eval-pairs: {error}", file=sys.stderr)
        return 2
    options = _stream_options(commands, parsed, is_stream=bool(stream))
    # One thread, as the semantic cache has: the figures of time are those of one core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from cache.semantic.embedding.errors import EmbeddingError
    from cache.semantic.embedding.load import load_encoder

    try:
        encoder = load_encoder(parsed.model, models_folder())
    except EmbeddingError as error:
        print(f"keepgate eval-pairs: {error}", file=sys.stderr)
        return 1
    file = str(parsed.file)
    if stream:
        from cache.semantic.evaluation.streams.report import format_stream_report, report_on_stream

        report = report_on_stream(file, stream, encoder, _show, parsed.delta, options)
        _show("")
        text = format_stream_report(report)
    else:
        from cache.semantic.evaluation.report import format_report, report_on
        from cache.semantic.evaluation.verdicts import verdicts_of

        verdicts = verdicts_of(pairs, encoder, lambda done: _show(f"{done} of {len(pairs)} pairs"))
        _show("")
        report = report_on(file, pairs, verdicts, encoder.name, parsed.delta)
        text = format_report(report)
    print(json.dumps(report, indent=2) if parsed.json else text)
    return 0


def parser() -> _Parser:
    """Its arguments."""
    arguments = _Parser(
        prog="keepgate eval-pairs",
        description=_DESCRIPTION,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    arguments.add_argument("file", metavar="FILE", type=Path, help="the pairs or the stream")
    arguments.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments.add_argument(
        "--delta", metavar="SHARE", type=_delta, default=0.01, help="wrong answers per request that are allowed (0.01)"
    )
    arguments.add_argument(
        "--model",
        metavar="NAME",
        default="default",
        help="a sentence-transformers model by name or path (all-MiniLM-L6-v2, which ships as a package)",
    )
    stream = arguments.add_argument_group("of streams")
    stream.add_argument(
        "--judge-recall", metavar="SHARE", type=_share, help=f"same answers that are judged to be the same ({_RECALL})"
    )
    stream.add_argument(
        "--judge-false-same",
        metavar="SHARE",
        type=_share,
        help=f"different answers that are judged to be the same ({_FALSE_SAME})",
    )
    stream.add_argument("--orders", metavar="N", type=_count, help="ask in N random orders, and not in the file's")
    stream.add_argument("--seed", metavar="N", type=_count, help="of orders, audits and the judge's errors (0)")
    return arguments


def _stream_options(arguments: _Parser, parsed: argparse.Namespace, *, is_stream: bool) -> StreamOptions:
    """Those of a stream as they were given, or their defaults; ends the command if a file of pairs has any."""
    given = {name: getattr(parsed, name) for name in ("judge_recall", "judge_false_same", "orders", "seed")}
    for name, value in given.items():
        if value is not None and not is_stream:
            arguments.error(f"--{name.replace('_', '-')} is for streams, and {parsed.file} has pairs")
    recall = _RECALL if parsed.judge_recall is None else parsed.judge_recall
    false_same = _FALSE_SAME if parsed.judge_false_same is None else parsed.judge_false_same
    if not false_same < recall:
        arguments.error(f"--judge-recall must be above --judge-false-same, and {recall:g} is not above {false_same:g}")
    return StreamOptions(recall, false_same, parsed.orders or 0, parsed.seed or 0)


def _delta(written: str) -> float:
    delta = _number(written)
    if not 0.0 < delta < 1.0:
        raise argparse.ArgumentTypeError(f"{written!r} is no share; it must be above 0 and below 1, such as 0.01")
    return delta


def _share(written: str) -> float:
    share = _number(written)
    if not 0.0 <= share <= 1.0:
        raise argparse.ArgumentTypeError(f"{written!r} is no share; it must be from 0 to 1, such as 0.98")
    return share


def _number(written: str) -> float:
    try:
        return float(written)
    except ValueError:
        return -1.0


def _count(written: str) -> int:
    if not (written.isascii() and written.isdigit() and len(written) < 10):
        raise argparse.ArgumentTypeError(f"{written!r} is no count; it must be a whole number such as 10")
    return int(written)


def _show(progress: str) -> None:
    """How far it is, on the last line of a terminal; "" clears it."""
    if sys.stderr.isatty():
        print(f"\r{progress:<60}", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
