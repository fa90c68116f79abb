"""``keepgate profile``: where time and memory go. torch is imported once arguments are known to be right."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from backend.commands.argument_types import number_between, positive
from backend.commands.command_line import (
    Parser,
    exit_on_broken_pipe,
    ignore_broken_pipe,
    progress_printer,
    run_command,
)
from backend.commands.serve import add_engine_arguments, engine_config, template_of
from backend.runners.fused.thread_count import limit_spinning

_DESCRIPTION = """\
Run requests through the engine, in this process and without HTTP, and show where time and memory went, what bounds the
speed, and by which calculation."""

_NOTES = """\
examples:
  keepgate profile
  keepgate profile --model ./Qwen3-1.7B --quantization int8 --requests questions.jsonl --concurrency 8
  keepgate profile --json --price-per-hour 0.40"""

_MOST_DOLLARS = 100_000


def run(words: Sequence[str]) -> int:
    """The command; returns the exit status: 1 if the model or a request is wrong, 2 if an argument is."""
    return run_command("keepgate profile", lambda: _profile(words))


def _profile(words: Sequence[str]) -> None:
    exit_on_broken_pipe()
    arguments = _parser().parse_args(words)
    engine, template = engine_config(arguments), template_of(arguments)
    ignore_broken_pipe()  # while a hub is asked
    limit_spinning()
    from backend.profiling.profile import ProfileConfig, profile_model
    from backend.profiling.report import as_json, as_text

    config = ProfileConfig(
        arguments.model, engine, template, arguments.requests, arguments.concurrency, arguments.price_per_hour
    )
    run = profile_model(config, progress_printer("profile"))
    exit_on_broken_pipe()
    print(json.dumps(as_json(run.profile), indent=2) if arguments.json else as_text(run.profile))


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
        "--price-per-hour",
        type=number_between(0, _MOST_DOLLARS),
        metavar="DOLLARS",
        help="what the machine costs, for the cost of 1,000 tokens (default: not known)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    add_engine_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
