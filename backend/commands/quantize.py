"""The command ``keepgate quantize``. Light at import: torch is loaded only when it runs."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backend.commands.argument_types import non_negative, positive, threads
from backend.commands.serve import Parser, end_with_the_reader, outlive_readers
from backend.errors import OUT_OF_MEMORY, ModelError, is_out_of_memory

if TYPE_CHECKING:
    import torch

    from backend.quantization.methods.recipe import Recipe
    from backend.quantized_weights.quantized_linear import Scheme

_DESCRIPTION = """\
Make a directory with the model in fewer bits, which `keepgate backend --model DIR`, vLLM and transformers load.
Killed and run again with the same options, it goes on from the last finished layer (kept in DIR.partial)."""

_EXAMPLES = """\
examples:
  keepgate quantize default --method gptq --bits 4 --group-size 64 --calibration valid.txt.gz --out smollm2-int4
  keepgate quantize ./Llama-3.2-1B --method mixed --average-bits 5.5 --calibration text.txt --out llama-mixed
  keepgate quantize ./Qwen3-1.7B --scheme fp8 --out qwen-fp8"""

_SCHEMES = ("int", "fp8", "fp8-tensor", "nf4", "nf4-single")
_NEED_TEXT = ("gptq", "awq", "mixed")
_ORDERED = ("gptq", "mixed")
"""Methods that round one input after the other."""
_TEXT_DEFAULTS = {"windows": 128, "window_tokens": 512, "seed": 0}
"""Of options that say how a calibration text is read; None where they are not given, so that this can be told."""
_MOST_SEED = 2**64 - 1


def run(words: Sequence[str]) -> int:
    """The command; returns the exit status: 0, or 1 if there is no new directory, and one line says why."""
    try:
        return _run(words)
    except KeyboardInterrupt:
        print("keepgate quantize: stopped; the same command goes on from the last finished layer", file=sys.stderr)
        return 130


def _run(words: Sequence[str]) -> int:
    end_with_the_reader()
    parser = _parser()
    arguments = parser.parse_args(words)
    _check(parser, arguments)
    outlive_readers()
    started = time.monotonic()

    def progress(sentence: str) -> None:
        print(f"[quantize {time.monotonic() - started:6.1f} s] {sentence}", file=sys.stderr, flush=True)

    import torch

    torch.set_num_threads(arguments.threads or len(os.sched_getaffinity(0)))
    from backend.model_loader.source import resolve_model
    from backend.quantization.methods.quantize import Quantization, check_new

    try:
        check_new(arguments.out)
        source = resolve_model(arguments.model, progress, as_floats=True)
        tokens = _windows(arguments, source.directory) if arguments.calibration else None
        report = Quantization(source.directory, arguments.out, _recipe(arguments), tokens).run(progress)
    except (ModelError, OSError) as error:
        print(f"keepgate quantize: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"keepgate quantize: {OUT_OF_MEMORY}", file=sys.stderr)
        return 1
    end_with_the_reader()
    print(json.dumps(report.as_json(), indent=1) if arguments.json else report.as_table())
    return 0


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
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the directory to be made")
    parser.add_argument(
        "--method",
        choices=["rtn", "gptq", "awq", "mixed"],
        default="rtn",
        help="rtn: round to nearest; gptq: make up for each column's error in the next; awq: scale by activations; "
        "mixed: 4, 8 or 16 bits for each group of matrices by what it loses, rounded by gptq (default: %(default)s)",
    )
    parser.add_argument(
        "--scheme",
        choices=_SCHEMES,
        default="int",
        help="what codes stand for; all but int are only rounded to nearest (default: %(default)s)",
    )
    parser.add_argument("--bits", type=int, choices=[4, 8], help="of an integer (default: 4)")
    parser.add_argument(
        "--group-size",
        type=_group_size,
        metavar="N",
        help="inputs that share a scale, -1 for all of an output; where it does not divide a matrix's inputs, the next "
        "smaller of 128, 64 and 32 that does (default: 128 with 4 bits, -1 with 8)",
    )
    parser.add_argument("--asymmetric", action="store_true", help="keep the code of zero of each group too")
    parser.add_argument(
        "--activation-bits",
        type=int,
        choices=[8, 16],
        help="of what is multiplied with weights of 8 bits; 8: it is rounded too, a scale for each row (default: 16)",
    )
    parser.add_argument(
        "--act-order",
        choices=["weight", "order", "none"],
        help="of gptq and mixed: round inputs that see much first, in the groups that they are in anyway (weight), or "
        "in groups made in that order, which is kept and needs a gather when the model is served (order); or not "
        "(none). transformers loads what order makes with compressed-tensors up to 0.18 only (default: weight)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="a text like those the model will see, .txt or .txt.gz; gptq, awq and mixed need it",
    )
    parser.add_argument(
        "--windows",
        type=positive,
        metavar="N",
        help=f"of calibration text (default: {_TEXT_DEFAULTS['windows']})",
    )
    parser.add_argument(
        "--window-tokens",
        type=positive,
        metavar="N",
        help=f"tokens of each (default: {_TEXT_DEFAULTS['window_tokens']})",
    )
    parser.add_argument(
        "--seed",
        type=_seed,
        metavar="N",
        help=f"of the windows' places in the text (default: {_TEXT_DEFAULTS['seed']})",
    )
    parser.add_argument(
        "--average-bits", type=_bits, metavar="BITS", help="of mixed: of a weight, scales included, at most"
    )
    parser.add_argument(
        "--max-kl",
        type=_nats,
        metavar="NATS",
        help="of mixed: what may be lost a token, as KL to the unquantised model, in place of --average-bits",
    )
    parser.add_argument("--threads", type=threads, metavar="N", help="(default: the cores this process may use)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON in place of a table")
    return parser


def _check(parser: Parser, arguments: argparse.Namespace) -> None:
    """Options that do not go together end the process, as unknown ones do."""
    method = arguments.method
    if method in _NEED_TEXT and arguments.calibration is None:
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
    if method not in _ORDERED and arguments.act_order is not None:
        parser.error(f"--act-order is for --method {' and '.join(_ORDERED)}, and not for {method}")
    for option, default in _TEXT_DEFAULTS.items():
        if getattr(arguments, option) is None:
            setattr(arguments, option, default)
        elif arguments.calibration is None:
            parser.error(f"--{option.replace('_', '-')} is of the calibration text: --calibration FILE")


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


def _seed(text: str) -> int:
    seed = non_negative(text)
    if seed > _MOST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range, expected 0 to {_MOST_SEED}")
    return seed


def _bits(text: str) -> float:
    return _number(text, 4, 16)


def _nats(text: str) -> float:
    return _number(text, 1e-6, 100)


def _number(text: str, least: float, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range, expected {least:g} to {most:g}")
    return number


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
