"""GPTQ and AWQ beside another project's, on the same model, calibration and settings."""

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from backend.evaluation.perplexity import Loss, perplexity
from backend.evaluation.scores import Scores
from backend.model_loader.source import ModelSource, resolve_model
from backend.model_loader.weights import load_weights, read_config
from backend.quantization.calibration.text import token_windows
from backend.quantization.methods.quantize import Quantization
from backend.quantization.methods.recipe import Recipe
from backend.quantized_weights.int_scheme import IntScheme
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import ROOT, CannotMeasure, cores, run_program
from benchmarks.quantization.wikitext_scores import BF16, rise, rounded, runner_of_bits, scores_of, wikitext_tokens

GPTQMODEL = "KEEPGATE_PEER_GPTQMODEL"
_HOW = "the Python of an environment with gptqmodel"
_CALIBRATION = ROOT / "backend" / "quantization" / "calibration" / "wikitext-2-valid.txt.gz"
_PROGRAM = Path(__file__).parent / "peer_packages" / "gptqmodel_package.py"
_WINDOWS, _QUICK_WINDOWS, _WINDOW_TOKENS = {"gptq": 32, "awq": 8}, 1, 512
"""By method. The other package's AWQ takes minutes a layer for more."""
_TOKENS, _QUICK_TOKENS = 8_192, 512
_GROUP = 64
_RECIPES = {"gptq": Recipe("gptq", IntScheme(4, _GROUP)), "awq": Recipe("awq", IntScheme(4, _GROUP, "integer"))}
_METHOD = """\
SmolLM2-135M-Instruct in four bits, a scale for 64 inputs each, calibrated on the same windows of {tokens} tokens of
WikiText-2's validation split ({windows}), embedding and head left alone. GPTQ: symmetric, no act-order in the files,
all else as each has it by itself: {version} moves groups within the order of the activations and has a damping of 5
%, Keepgate rounds in the order of the Hessian's diagonal, searches ranges, refines codes and scales by turns and has
a damping of 1 %. AWQ: with zeros. Then both checkpoints are read by Keepgate, and what their bits say is multiplied
in half floats: the rise of the perplexity over the same weights in bfloat16 ({reference:.3f}), on the first
{scored:,} tokens of the test split as in "What quantised weights lose". The Python of {variable} is that of the
other package."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A method, and the checkpoints that both have made by it."""

    method: str
    ours: Path
    theirs: Path


async def measure(quick: bool) -> Figure:
    python = python_of(os.environ)
    methods = ("gptq",) if quick else tuple(_RECIPES)
    source = await asyncio.to_thread(resolve_model, "default", lambda _: None)
    windows = {method: _QUICK_WINDOWS if quick else _WINDOWS[method] for method in methods}
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as folder:
        pairs = [await _pair(method, source, count, python, Path(folder, method)) for method, count in windows.items()]
        version = (pairs[0].theirs / "made-by.txt").read_text("utf-8")
        count = _QUICK_TOKENS if quick else _TOKENS
        reference, scored = await asyncio.to_thread(_scored, source, pairs, count)
    rows = [
        row for pair, two in zip(pairs, scored, strict=True) for row in rows_of(pair.method, version, two, reference)
    ]
    method = _METHOD.format(
        windows=", ".join(f"{method}: {count}" for method, count in windows.items()),
        tokens=_WINDOW_TOKENS,
        version=version,
        reference=perplexity(reference),
        scored=count,
        variable=GPTQMODEL,
    )
    return Figure(
        figure="quantization_peers", title="Quantised beside another package", method=method, rows=tuple(rows)
    )


def python_of(environment: Mapping[str, str]) -> str:
    """Raises CannotMeasure where the environment names none."""
    if python := environment.get(GPTQMODEL):
        return python
    raise CannotMeasure(f"No other package is there to compare with. Name one: {GPTQMODEL}: {_HOW}")


def rows_of(method: str, version: str, scored: tuple[Scores, Scores], reference: Scores) -> list[Row]:
    """`scored`: ours, theirs."""
    rises = [rise(scores, reference) for scores in scored]
    kl = [Loss.of(scores, reference).kl_mean for scores in scored]
    return [
        Row(
            what=f"{method}: {what}, against that of {version}",
            unit=RATIO,
            rounds=(ours / theirs,),
            target=Target("most", 1.1),
            beside=({name: ours, "theirs": theirs},),
        )
        for what, name, (ours, theirs) in (("rise of the perplexity", "rise in %", rises), ("KL", "KL", kl))
    ]


def _calibration(source: ModelSource, windows: int) -> torch.Tensor:
    tokenizer = Tokenizer.from_file(str(source.directory / "tokenizer.json"))
    return token_windows(tokenizer, _CALIBRATION, windows, _WINDOW_TOKENS)


async def _pair(method: str, source: ModelSource, windows: int, python: str, folder: Path) -> _Pair:
    pair = _Pair(method, folder / "ours", folder / "theirs")
    tokens = await asyncio.to_thread(_calibration, source, windows)
    await asyncio.to_thread(_make_ours, pair, source, tokens)
    job = await asyncio.to_thread(_write_job, pair, source, tokens)
    # In a folder of its own: it leaves logs where it stands.
    command = (python, str(_PROGRAM), str(job))
    await run_program("gptqmodel", command, cores().all, {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}, folder)
    return pair


def _make_ours(pair: _Pair, source: ModelSource, tokens: torch.Tensor) -> None:
    _use_all_cores()
    pair.ours.parent.mkdir()
    Quantization(source.directory, pair.ours, _RECIPES[pair.method], tokens).run(lambda _: None)


def _write_job(pair: _Pair, source: ModelSource, tokens: torch.Tensor) -> Path:
    folder = pair.theirs.parent
    np.save(folder / "windows.npy", tokens.numpy())
    job = {
        "model": str(source.directory),
        "checkpoint": str(pair.theirs),
        "windows": str(folder / "windows.npy"),
        "method": pair.method,
        "group": _GROUP,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    return path


def _scored(source: ModelSource, pairs: Sequence[_Pair], count: int) -> tuple[Scores, list[tuple[Scores, Scores]]]:
    """The scores of the reference, then ours and theirs of each pair."""
    _use_all_cores()
    config = read_config(source.directory)
    made = [checkpoint for pair in pairs for checkpoint in (pair.ours, pair.theirs)]
    runners = [runner_of_bits(config, load_weights(checkpoint, config)) for checkpoint in made]
    reference = runner_of_bits(config, rounded(load_weights(source.directory, config), BF16))
    of_reference, *scored = scores_of(wikitext_tokens(source, count), reference, runners)
    return of_reference, list(zip(scored[::2], scored[1::2], strict=True))


def _use_all_cores() -> None:
    os.sched_setaffinity(0, cores().all)  # of this thread, and of those that are started from it
    torch.set_num_threads(len(cores().all))
