"""``keepgate eval``: what a model makes of a text. Light until its arguments and its file are known to be right."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import get_args

from backend.commands.argument_types import context, positive, threads
from backend.commands.serve import Parser, end_with_the_reader, outlive_readers
from backend.engine.config import Device, EngineConfig
from backend.errors import OUT_OF_MEMORY, ModelError, is_out_of_memory
from backend.quantized_weights.names import Quantization
from backend.runners.fused.thread_count import limit_spinning
from backend.text.text_file import read_text

_DESCRIPTION = """\
Score a text with a model as `keepgate backend` would serve it, and compare it with the same model unquantised."""

_NOTES = """\
The text is read in windows of --window tokens, each --stride further on than the one before and a sequence of its own.
Every token but the first is scored once, in the first window that it is in: after at least window - stride others,
but for the first window's, which have fewer before them.

  perplexity       exponential of the mean negative log-likelihood of the tokens
  KL               Kullback-Leibler divergence from the reference's next-token distribution to the model's, in nats
  top-1 agreement  how often both have the same first choice
  bits             of the layers' matrices and the head, scales included; the embedding is not in it

examples:
  keepgate eval default --text wikitext-2-test.txt.gz --quantization int8
  keepgate eval ./SmolLM2-gptq --reference ./SmolLM2 --text test.txt --limit 20000 --json"""

_BETWEEN_LINES = 5.0
"""Seconds from one line of progress to the next."""


def run(words: Sequence[str]) -> int:
    """The command; returns the exit status: 1 where the model or the text is wrong, 2 where an argument is."""
    try:
        return _run(words)
    except KeyboardInterrupt:
        return 130


def _run(words: Sequence[str]) -> int:
    end_with_the_reader()
    parser = _parser()
    arguments = parser.parse_args(words)
    window: int = arguments.window
    stride: int = arguments.stride or window // 2
    if stride >= window:
        parser.error(
            f"--stride: {stride} is out of range, expected 1 to {window - 1}: less than --window, so that each token "
            "that is scored has another before it"
        )
    try:
        text = read_text(arguments.text)
    except ModelError as error:
        print(f"keepgate eval: {error}", file=sys.stderr)
        return 1
    outlive_readers()  # while a hub is asked
    limit_spinning()
    from backend.evaluation.model_evaluation import Question, evaluate_model
    from backend.evaluation.report import as_json, as_text

    engine = EngineConfig(
        quantization=arguments.quantization,
        device=arguments.device,
        threads=arguments.threads or len(os.sched_getaffinity(0)),
    )
    question = Question(
        arguments.model, arguments.reference, text, arguments.text.name, engine, window, stride, arguments.limit
    )
    progress = _Progress()
    try:
        report = evaluate_model(question, progress.say, progress.scored)
    except (ModelError, OSError) as error:
        print(f"keepgate eval: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"keepgate eval: {OUT_OF_MEMORY}", file=sys.stderr)
        return 1
    end_with_the_reader()
    print(json.dumps(as_json(report), indent=2) if arguments.json else as_text(report))
    return 0


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
        help="as of `keepgate backend` (default: %(default)s)",
    )
    parser.add_argument(
        "--reference",
        metavar="MODEL",
        help="what to compare with, such as the model that a quantised one was made from (default: MODEL without "
        "--quantization)",
    )
    parser.add_argument(
        "--window",
        type=context,
        metavar="TOKENS",
        default=512,
        help="tokens that are read at once, 2 or more (default: %(default)s)",
    )
    parser.add_argument(
        "--stride",
        type=positive,
        metavar="TOKENS",
        help="from one window to the next, less than --window (default: half of it)",
    )
    parser.add_argument("--limit", type=positive, metavar="TOKENS", help="score so many tokens (default: all)")
    parser.add_argument(
        "--device",
        choices=get_args(Device),
        default="auto",
        help="what computes; auto is a CUDA device that can, else the CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=threads, metavar="N", help="threads that compute (default: the cores this process may use)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser


class _Progress:
    """Says on stderr how far it is."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()
        self._first: tuple[float, int] | None = None

    def say(self, sentence: str) -> None:
        self._said = time.monotonic()
        print(f"[eval {self._said - self._began:5.1f} s] {sentence}", file=sys.stderr, flush=True)

    def scored(self, done: int, of: int, surprise: float) -> None:
        """A line every few seconds. How long it lasts is judged without the first window, which warms up."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        elif now - self._said >= _BETWEEN_LINES:
            since, before = self._first
            left = (of - done) * (now - since) / (done - before)
            self.say(f"{done:,} of {of:,} tokens, perplexity {exp(surprise):.2f} so far, {left:,.0f} s left")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
