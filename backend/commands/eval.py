"""``keepgate eval``: the perplexity of a model. torch is imported once arguments and text are checked."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from math import exp
from pathlib import Path
from typing import get_args

from backend.commands.argument_types import context, positive, threads
from backend.commands.command_line import (
    Parser,
    exit_on_broken_pipe,
    ignore_broken_pipe,
    progress_printer,
    run_command,
)
from backend.engine.config import Device, EngineConfig
from backend.quantized_weights.names import Quantization
from backend.runners.fused.thread_count import limit_spinning
from backend.text.text_file import read_text

_DESCRIPTION = """\
Score a text with a model as `keepgate backend` would serve it, and compare it with the same model unquantised."""

_NOTES = """\
The text is split into windows of --window tokens, each a sequence of its own that starts --stride after the previous
one. Every token but the first is scored once, in the first window that contains it: after at least window - stride
others, except in the first window.

  perplexity       exponential of the mean negative log-likelihood of the tokens
  KL               Kullback-Leibler divergence from the reference's next-token distribution to the model's, in nats
  top-1 agreement  how often both have the same first choice
  bits             per weight of the layers' matrices and the head, including scales, without the embedding

examples:
  keepgate eval default --text wikitext-2-test.txt.gz --quantization int8
  keepgate eval ./SmolLM2-gptq --reference ./SmolLM2 --text test.txt --limit 20000 --json"""

_PROGRESS_SECONDS = 5.0
"""Time between two lines of progress."""


def run(words: Sequence[str]) -> int:
    """The command; returns the exit status: 1 if the model or the text is wrong, 2 if an argument is."""
    return run_command("keepgate eval", lambda: _evaluate(words))


def _evaluate(words: Sequence[str]) -> None:
    exit_on_broken_pipe()
    parser = _parser()
    arguments = parser.parse_args(words)
    window: int = arguments.window
    stride: int = arguments.stride or window // 2
    if stride >= window:
        parser.error(
            f"--stride: {stride} is out of range, expected 1 to {window - 1}: less than --window, so that each token "
            "that is scored has another before it"
        )
    text = read_text(arguments.text)
    ignore_broken_pipe()  # while a hub is asked
    limit_spinning()
    from backend.evaluation.evaluate import EvaluationConfig, evaluate_model
    from backend.evaluation.report import as_json, as_text

    engine = EngineConfig(
        quantization=arguments.quantization,
        device=arguments.device,
        threads=arguments.threads or len(os.sched_getaffinity(0)),
    )
    config = EvaluationConfig(
        arguments.model, arguments.reference, text, arguments.text.name, engine, window, stride, arguments.limit
    )
    progress = progress_printer("eval")
    report = evaluate_model(config, progress, _ScoringProgress(progress))
    exit_on_broken_pipe()
    print(json.dumps(as_json(report), indent=2) if arguments.json else as_text(report))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="keepgate eval",
        description=_DESCRIPTION,
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="'default' (the bundled SmolLM2-135M-Instruct), a directory with config.json and safetensors, "
        "a .gguf file, or a hub id",
    )
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="text in UTF-8, plain or packed with gzip"
    )
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        default="none",
        help="as for `keepgate backend` (default: %(default)s)",
    )
    parser.add_argument(
        "--reference",
        metavar="MODEL",
        help="model to compare with, such as the one that a quantised model was made from (default: MODEL without "
        "--quantization)",
    )
    parser.add_argument(
        "--window",
        type=context,
        metavar="TOKENS",
        default=512,
        help="tokens of a window, 2 or more (default: %(default)s)",
    )
    parser.add_argument(
        "--stride",
        type=positive,
        metavar="TOKENS",
        help="tokens from one window to the next, less than --window (default: half of it)",
    )
    parser.add_argument("--limit", type=positive, metavar="TOKENS", help="number of tokens to score (default: all)")
    parser.add_argument(
        "--device",
        choices=get_args(Device),
        default="auto",
        help="where to compute; auto is a CUDA device if there is one, else the CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=threads, metavar="N", help="threads that compute (default: the cores this process may use)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser


class _ScoringProgress:
    """Prints every few seconds how many tokens have been scored, and an estimate of the time left."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._printed = time.monotonic()
        self._first: tuple[float, int] | None = None

    def __call__(self, done: int, total: int, mean_nll: float) -> None:
        """Called after each window. The estimate leaves out the first window, which warms up."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        elif now - self._printed >= _PROGRESS_SECONDS:
            self._printed = now
            since, before = self._first
            left = (total - done) * (now - since) / (done - before)
            self._progress(f"{done:,} of {total:,} tokens, perplexity {exp(mean_nll):.2f} so far, {left:,.0f} s left")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
