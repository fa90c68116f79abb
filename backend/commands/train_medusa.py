"""``keepgate train-medusa``: trains heads that propose an answer's next tokens. torch is imported after the arguments
are checked."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from backend.commands.argument_types import integer_between, positive, threads
from backend.commands.command_line import (
    Parser,
    exit_on_broken_pipe,
    ignore_broken_pipe,
    progress_printer,
    run_command,
)
from backend.text.text_file import read_text

_DESCRIPTION = """\
Train heads on a frozen model that propose the next tokens of its answers, for `keepgate backend --medusa DIR`
(Medusa, arXiv 2401.10774). The text gives the prompts; the heads learn from what the model itself answers.
If it is stopped, the same command goes on where it was."""

_EXAMPLES = """\
examples:
  keepgate train-medusa default --text wiki.txt.gz --out smollm2-heads
  keepgate backend --model default --medusa smollm2-heads"""

_BAR = 28


def run(words: Sequence[str]) -> int:
    """The command; returns the exit status: 1 if no heads were trained, 2 if an argument is wrong."""
    return run_command("keepgate train-medusa", lambda: _train(words), "stopped; the same command goes on from here")


def _train(words: Sequence[str]) -> None:
    exit_on_broken_pipe()
    arguments = _parser().parse_args(words)
    ignore_broken_pipe()
    text = read_text(arguments.text)
    progress = progress_printer("train-medusa")
    from backend.engine.config import EngineConfig
    from backend.model import load_model
    from backend.model_loader.source import resolve_model
    from backend.speculation.medusa_training import MedusaTraining, TrainingPlan

    count = arguments.threads or len(os.sched_getaffinity(0))
    model = load_model(resolve_model(arguments.model, progress), EngineConfig(threads=count), progress)
    plan = TrainingPlan(
        heads=arguments.heads, vocabulary=arguments.vocabulary, answers=arguments.answers, steps=arguments.steps
    )
    bar = _ProgressBar()
    trained = MedusaTraining(model, text, plan, arguments.out, bar.advance).run()
    bar.close()
    exit_on_broken_pipe()
    if arguments.json:
        print(json.dumps(dataclasses.asdict(trained), indent=1))
        return
    print(f"{trained.tokens:,} tokens; loss of what was held out {trained.loss:.3f}")
    for number, share in enumerate(trained.accuracy, start=1):
        print(f"head {number}: guesses {share:.1%} of the tokens {number + 1} places on")
    print(f"heads: {arguments.out}; loss by step: {arguments.out / 'loss.svg'}")


def _parser() -> Parser:
    parser = Parser(
        prog="keepgate train-medusa",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a directory with config.json and safetensors, a .gguf file, a hub id, or 'default' (the bundled model)",
    )
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="text that prompts are taken from, .txt or .txt.gz"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory for the heads")
    parser.add_argument(
        "--heads",
        type=integer_between(1, 8),
        metavar="N",
        default=4,
        help="tokens that are guessed beyond the next one (default: %(default)s)",
    )
    parser.add_argument(
        "--vocabulary",
        type=positive,
        metavar="N",
        default=8192,
        help="the most frequent tokens, which the heads may guess; fewer make a guess cheaper (default: %(default)s)",
    )
    parser.add_argument(
        "--answers",
        type=positive,
        metavar="N",
        default=512,
        help="answers of 192 tokens to learn from; their hidden states take 2 bytes a number on disk "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=positive, metavar="N", default=1500, help="steps of the optimiser (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=threads,
        metavar="N",
        help="threads that compute (default: the cores this process may use)",
    )
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    return parser


class _ProgressBar:
    """A line on stderr that is written anew, or a line for each tenth where stderr is no terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._stage = ""
        self._began = 0.0
        self._first = 0
        self._shown = -1

    def advance(self, stage: str, done: int, whole: int, remark: str) -> None:
        """Shows how far a stage is."""
        now = time.monotonic()
        if stage != self._stage:
            self.close()
            self._stage, self._began, self._first, self._shown = stage, now, done, -1
        share = done / whole
        shown = int(share * (_BAR if self._terminal else 10))
        if not self._terminal and shown == self._shown and done < whole:
            return
        self._shown = shown
        fresh = done - self._first
        left = f", {(now - self._began) / fresh * (whole - done):.0f} s left" if fresh > 0 and done < whole else ""
        filled = "█" * int(share * _BAR)
        line = f"{stage:13} {filled:░<{_BAR}} {done}/{whole}{left}{'; ' + remark if remark else ''}"
        if self._terminal:
            print(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the line."""
        if self._stage and self._terminal:
            print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
