"""The command `keepgate eval-pairs`. Light until its arguments and its file are known to be right."""

import argparse
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from cache.semantic.embedding.model_files import models_folder
from cache.semantic.evaluation.rows import UnreadableFile, read_rows

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
  keepgate eval-pairs log.csv --judge-recall 0.95"""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where the options are listed."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main() -> None:
    """Run the command; the exit status is 2 where an argument or the file is wrong, 1 where the model is."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    commands = parser()
    parsed = commands.parse_args()
    recall, false_same = parsed.judge_recall, parsed.judge_false_same
    if not false_same < recall:
        commands.error(f"--judge-recall must be above --judge-false-same, and {recall:g} is not above {false_same:g}")
    try:
        pairs, asked = read_rows(parsed.file)
    except UnreadableFile as error:
        commands.exit(2, f"{commands.prog}: {error}\n")
    # One thread, as the semantic cache has.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from cache.semantic.embedding.errors import ModelUnusable
    from cache.semantic.embedding.load import load_encoder
    from cache.semantic.evaluation.pairs import format_pairs_report, report_on_pairs
    from cache.semantic.evaluation.stream_report import format_stream_report, report_on_stream
    from cache.semantic.policy.policy import JudgeError

    try:
        encoder = load_encoder(parsed.model, models_folder())
    except ModelUnusable as error:
        commands.exit(1, f"{commands.prog}: {error}\n")
    if pairs:
        report = report_on_pairs(pairs, encoder, _show, parsed.delta)
        text = format_pairs_report(report)
    else:
        report = report_on_stream(asked, encoder, _show, parsed.delta, JudgeError(recall, false_same))
        text = format_stream_report(report)
    _show("")
    file = str(parsed.file)
    print(json.dumps({"file": file, **report}, indent=2) if parsed.json else f"{file}: {text}")


def parser() -> _Parser:
    """Its arguments."""
    arguments = _Parser(
        prog="keepgate eval-pairs",
        description=_DESCRIPTION,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = arguments.add_argument
    add("file", metavar="FILE", type=Path, help="the pairs or the stream")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--delta", metavar="SHARE", type=_delta, default=0.01, help="wrong answers per request that are allowed (0.01)")
    name = "a sentence-transformers model by name or path (all-MiniLM-L6-v2, which ships as a package)"
    add("--model", metavar="NAME", default="default", help=name)
    add = arguments.add_argument_group("of streams").add_argument
    same = "answers that are judged to be the same"
    add("--judge-recall", metavar="SHARE", type=_share, default=0.98, help=f"same {same} (0.98)")
    add("--judge-false-same", metavar="SHARE", type=_share, default=0.01, help=f"different {same} (0.01)")
    return arguments


def _delta(written: str) -> float:
    if 0.0 < (share := _share(written)) < 1.0:
        return share
    raise argparse.ArgumentTypeError(f"{written!r} is no share; it must be above 0 and below 1, such as 0.01")


def _share(written: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 <= (share := float(written)) <= 1.0:
            return share
    raise argparse.ArgumentTypeError(f"{written!r} is no share; it must be from 0 to 1, such as 0.98")


def _show(progress: str) -> None:
    """How far it is, on the last line of a terminal; "" clears it."""
    if sys.stderr.isatty():
        print(f"\r{progress:<60}", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
