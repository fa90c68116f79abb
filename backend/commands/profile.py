"""``keepgate profile``: where time and memory go. torch is imported once arguments are known to be right."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from backend.commands.argument_types import integer_between, number_between, positive
from backend.commands.command_line import (
    Parser,
    exit_on_broken_pipe,
    ignore_broken_pipe,
    progress_printer,
    run_command,
)
from backend.commands.serve import add_engine_arguments, engine_config, template_of
from backend.errors import ModelError
from backend.profiling.changes import changes
from backend.runners.fused.thread_count import limit_spinning
from telemetry.logs import configure_logging

_DESCRIPTION = """\
Run requests through the engine, in this process and without HTTP, and show where time and memory went, what bounds the
speed, and by which calculation."""

_NOTES = """\
examples:
  keepgate profile
  keepgate profile --model ./Qwen3-1.7B --quantization int8 --requests questions.jsonl --concurrency 8
  keepgate profile --try all --output ./profile     what other settings would change; pictures, and files for Perfetto
  keepgate profile --json --price-per-hour 0.40"""

_MOST_DOLLARS = 100_000
_MOST_ROUNDS = 1000


def run(words: Sequence[str]) -> int:
    """The command; returns the exit status: 1 if the model or a request is wrong, 2 if an argument is."""
    return run_command("keepgate profile", lambda: _profile(words))


def _profile(words: Sequence[str]) -> None:
    exit_on_broken_pipe()
    arguments = _parser().parse_args(words)
    engine, template = engine_config(arguments), template_of(arguments)
    ignore_broken_pipe()  # while a hub is asked
    configure_logging("human", "warning")
    for handler in logging.getLogger().handlers:
        handler.addFilter(_Once())
    limit_spinning()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints to stderr
    from backend.profiling.page import write_files
    from backend.profiling.profile import ProfileConfig, profile_model
    from backend.profiling.report import as_json, as_text

    config = ProfileConfig(
        arguments.model,
        engine,
        template,
        arguments.requests,
        arguments.concurrency,
        arguments.price_per_hour,
        arguments.changes,
        arguments.rounds,
        arguments.output,
    )
    progress = progress_printer("profile")
    if arguments.output is not None:
        _make(arguments.output)
    run = profile_model(config, progress)
    if arguments.output is not None:
        write_files(run, arguments.output)
        progress(f"{arguments.output} has profile.html, timeline.json, operators.json and profile.json")
    exit_on_broken_pipe()
    print(json.dumps(as_json(run.profile), indent=2) if arguments.json else as_text(run.profile))


def _make(folder: Path) -> None:
    """Makes the folder for files before anything else, for a profile takes long. Raises ModelError, naming it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "profile.json").touch()
    except OSError as error:
        raise ModelError(f"--output {folder}: {error.strerror or error}; expected a folder to write to") from error


class _Once(logging.Filter):
    """Lets each message pass once: the report counts what they are about."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is new."""
        message = record.getMessage()
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="keepgate profile",
        description=_DESCRIPTION,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--requests",
        type=Path,
        metavar="FILE",
        help="a JSON object in each line, the body of a chat or of a completion (default: a small workload of prompts "
        "of different lengths)",
    )
    parser.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        default=4,
        help="requests at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--try",
        dest="changes",
        type=changes,
        metavar="CHANGES",
        default=(),
        help="run the workload with other settings too, in turn with these, and say which help: int8, int4, fp8, nf4 "
        "(weights), batch (twice as many requests at a time) and prefix-store, separated by commas; or all, which is "
        "int8,int4,batch,prefix-store",
    )
    parser.add_argument(
        "--rounds",
        type=integer_between(2, _MOST_ROUNDS),
        metavar="N",
        default=3,
        help="how often each of them is run, 2 or more (default: %(default)s)",
    )
    parser.add_argument(
        "--price-per-hour",
        type=number_between(0, _MOST_DOLLARS),
        metavar="DOLLARS",
        help="what the machine costs, for the cost of 1,000 tokens (default: not known)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write there: profile.html (pictures, for a browser), timeline.json and operators.json (for "
        "ui.perfetto.dev; the second is torch's profiler on a few steps), and profile.json (all figures)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    add_engine_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
