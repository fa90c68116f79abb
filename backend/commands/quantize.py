"""``keepgate quantize``: writes a model in fewer bits. torch is imported once the arguments are checked."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backend.commands.argument_types import integer_between, number_between, positive, threads
from backend.commands.command_line import (
    Parser,
    exit_on_broken_pipe,
    ignore_broken_pipe,
    progress_printer,
    run_command,
)

if TYPE_CHECKING:
    import torch

    from backend.quantization.methods.recipe import Recipe
    from backend.quantized_weights.quantized_linear import Scheme

_DESCRIPTION = """\
Write a directory with the model in fewer bits, for `keepgate backend --model DIR`, vLLM and transformers.
If it is stopped, the same command goes on from the last finished layer (stored in DIR.partial)."""

_EXAMPLES = """\
examples:
  keepgate quantize default --method gptq --bits 4 --group-size 64 --calibration valid.txt.gz --out smollm2-int4
  keepgate quantize ./Llama-3.2-1B --method mixed --average-bits 5.5 --calibration text.txt --out llama-mixed
  keepgate quantize ./Qwen3-1.7B --scheme fp8 --out qwen-fp8"""

_SCHEMES = ("int", "fp8", "fp8-tensor", "nf4", "nf4-single")
_CALIBRATED = ("gptq", "awq", "mixed")
_SEQUENTIAL = ("gptq", "mixed")
"""Methods that round the inputs one after the other."""
_TEXT_DEFAULTS = {"windows": 128, "window_tokens": 512, "seed": 0}
"""Defaults of options for the calibration text; None for the parser, so that they are refused without a text."""
_MAX_SEED = 2**64 - 1


def run(words: Sequence[str]) -> int:
    """The command; returns the exit status: 1 if no directory was made, 2 if an argument is wrong."""
    interrupted = "stopped; the same command goes on from the last finished layer"
    return run_command("keepgate quantize", lambda: _quantize(words), interrupted)


def _quantize(words: Sequence[str]) -> None:
    exit_on_broken_pipe()
    parser = _parser()
    arguments = parser.parse_args(words)
    _check(parser, arguments)
    ignore_broken_pipe()
    progress = progress_printer("quantize")
    import torch

    torch.set_num_threads(arguments.threads or len(os.sched_getaffinity(0)))
    from backend.model_loader.source import resolve_model
    from backend.quantization.methods.quantize import Quantization, check_new

    check_new(arguments.out)
    source = resolve_model(arguments.model, progress, as_floats=True)
    tokens = _windows(arguments, source.directory) if arguments.calibration else None
    report = Quantization(source.directory, arguments.out, _recipe(arguments), tokens).run(progress)
    exit_on_broken_pipe()
    print(json.dumps(report.as_json(), indent=1) if arguments.json else report.as_table())


def _parser() -> Parser:
    parser = Parser(
        prog="keepgate quantize",
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
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory for the result")
    parser.add_argument(
        "--method",
        choices=["rtn", "gptq", "awq", "mixed"],
        default="rtn",
        help="rtn: round to nearest; gptq: compensate each column's error in the next ones; awq: scale by activations; "
        "mixed: 4, 8 or 16 bits for each group of matrices by its loss, rounded by gptq (default: %(default)s)",
    )
    parser.add_argument(
        "--scheme",
        choices=_SCHEMES,
        default="int",
        help="number format of the codes; all but int are rounded to nearest (default: %(default)s)",
    )
    parser.add_argument("--bits", type=int, choices=[4, 8], help="bits of an integer (default: 4)")
    parser.add_argument(
        "--group-size",
        type=_group_size,
        metavar="N",
        help="inputs that share a scale, -1 for all of an output; if it does not divide a matrix's inputs, the next "
        "smaller of 128, 64 and 32 that does (default: 128 with 4 bits, -1 with 8)",
    )
    parser.add_argument("--asymmetric", action="store_true", help="store a zero point for each group")
    parser.add_argument(
        "--activation-bits",
        type=int,
        choices=[8, 16],
        help="bits of activations that are multiplied with 8-bit weights; 8: one scale for each row (default: 16)",
    )
    parser.add_argument(
        "--act-order",
        choices=["weight", "order", "none"],
        help="for gptq and mixed: round inputs with large activations first, within their groups (weight) or in groups "
        "made in that order, which is stored and needs a gather when the model is served (order); or in their own "
        "order (none). transformers reads the result of order with compressed-tensors up to 0.18 (default: weight)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="text like that which the model will see, .txt or .txt.gz; required by gptq, awq and mixed",
    )
    parser.add_argument(
        "--windows",
        type=positive,
        metavar="N",
        help=f"number of windows of calibration text (default: {_TEXT_DEFAULTS['windows']})",
    )
    parser.add_argument(
        "--window-tokens",
        type=positive,
        metavar="N",
        help=f"tokens of each window (default: {_TEXT_DEFAULTS['window_tokens']})",
    )
    parser.add_argument(
        "--seed",
        type=integer_between(0, _MAX_SEED),
        metavar="N",
        help=f"seed for the windows' places in the text (default: {_TEXT_DEFAULTS['seed']})",
    )
    parser.add_argument(
        "--average-bits",
        type=number_between(4, 16),
        metavar="BITS",
        help="for mixed: limit of the bits per weight, including scales",
    )
    parser.add_argument(
        "--max-kl",
        type=number_between(1e-6, 100),
        metavar="NATS",
        help="for mixed, in place of --average-bits: limit of the KL divergence per token from the unquantised model",
    )
    parser.add_argument(
        "--threads", type=threads, metavar="N", help="threads that compute (default: the cores this process may use)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON in place of a table")
    return parser


def _check(parser: Parser, arguments: argparse.Namespace) -> None:
    """Exits for options that contradict each other, as for unknown ones."""
    method = arguments.method
    if method in _CALIBRATED and arguments.calibration is None:
        parser.error(f"--method {method} needs a text: --calibration FILE")
    if arguments.scheme != "int":
        if method != "rtn":
            parser.error(f"--method {method} is for integers; --scheme {arguments.scheme} is rounded to nearest")
        for option in ("bits", "group_size", "asymmetric", "activation_bits"):
            if getattr(arguments, option):
                parser.error(f"--{option.replace('_', '-')} is for integers, and not for --scheme {arguments.scheme}")
    elif arguments.activation_bits == 8 and arguments.bits != 8:
        parser.error("--activation-bits 8 is for --bits 8")
    budgets = [name for name in ("average_bits", "max_kl") if getattr(arguments, name) is not None]
    if method == "mixed" and len(budgets) != 1:
        parser.error("--method mixed needs one of --average-bits and --max-kl")
    if method == "mixed" and arguments.bits == 8:
        parser.error("--method mixed chooses the bits; --bits is for other methods")
    if method != "mixed" and budgets:
        parser.error(f"--{budgets[0].replace('_', '-')} is for --method mixed")
    if method not in _SEQUENTIAL and arguments.act_order is not None:
        parser.error(f"--act-order is for --method {' and '.join(_SEQUENTIAL)}, and not for {method}")
    for option, default in _TEXT_DEFAULTS.items():
        if getattr(arguments, option) is None:
            setattr(arguments, option, default)
        elif arguments.calibration is None:
            parser.error(f"--{option.replace('_', '-')} is for a calibration text: --calibration FILE")


def _recipe(arguments: argparse.Namespace) -> Recipe:
    from backend.quantization.methods.recipe import Recipe

    return Recipe(
        method=arguments.method,
        scheme=_scheme(arguments),
        act_order=arguments.act_order or "weight",
        average_bits=arguments.average_bits,
        max_kl=arguments.max_kl,
    )


def _scheme(arguments: argparse.Namespace) -> Scheme:
    from backend.quantized_weights.fp8_scheme import Fp8Scheme
    from backend.quantized_weights.int_scheme import IntScheme
    from backend.quantized_weights.nf4_scheme import Nf4Scheme

    match arguments.scheme:
        case "fp8":
            return Fp8Scheme("row")
        case "fp8-tensor":
            return Fp8Scheme("tensor")
        case "nf4":
            return Nf4Scheme()
        case "nf4-single":
            return Nf4Scheme(double=False)
    group_size = arguments.group_size or (-1 if arguments.bits == 8 else 128)
    return IntScheme(
        8 if arguments.bits == 8 else 4,
        None if group_size == -1 else group_size,
        "integer" if arguments.asymmetric else "middle",
        8 if arguments.activation_bits == 8 else 16,
    )


def _windows(arguments: argparse.Namespace, directory: Path) -> torch.Tensor:
    from backend.chat.tokenizer import ModelTokenizer
    from backend.model_loader.weights import read_config
    from backend.quantization.calibration.text import token_windows

    config = read_config(directory)
    tokenizer = ModelTokenizer.load(directory, config).fast
    asked = arguments.windows, arguments.window_tokens, arguments.seed
    return token_windows(tokenizer, arguments.calibration, *asked, rows=config.vocab_size)


def _group_size(text: str) -> int:
    return -1 if text == "-1" else positive(text)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
