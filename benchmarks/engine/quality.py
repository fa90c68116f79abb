"""What each format of weights and KV loses: next-token distributions against float32, on text."""

import asyncio
import gzip
import itertools
import os
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner
from backend.model_loader.source import resolve_model
from backend.model_loader.weights import ModelWeights, load_weights, read_config
from backend.models.config import ModelConfig
from backend.quantization.selection.rounding import rounded
from backend.quantized_weights.int_scheme import IntScheme
from backend.runners.errors import RunnerUnavailable
from backend.runners.fused.build import load_fused_library
from backend.runners.fused.layout import KVPrecision
from backend.runners.fused.runner import FusedRunner
from backend.runners.torch.runner import TorchRunner
from backend.runners.warm_up import single_sequence_step
from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, cores

_TEXT = Path(__file__).resolve().parents[1] / "data" / "wikitext-2" / "test.txt.gz"
_WINDOW = 512
_SCHEMES = {"int8": (IntScheme(8), IntScheme(8)), "int4": (IntScheme(4, 32, "minimum"), IntScheme(8))}
_FORMATS: tuple[tuple[str, KVPrecision], ...] = tuple(
    itertools.product(("float16", "int8", "int4"), ("float16", "int8"))
)
_METHOD = """\
SmolLM2-135M-Instruct on the first {windows} windows of {window} tokens of WikiText-2's test split, each a sequence of
its own. KL is the mean over all positions of the Kullback-Leibler divergence from the next-token distribution of the
float32 reference runner to that of the fused runner, in nats; top-1 is how often both have the same first choice;
perplexity is of the window itself (the reference's median is {reference:.2f}). The checkpoint was made from 4-bit
weights with groups of 32 (Q4_1), which flatters int4 here. A round is a window."""


async def measure(quick: bool) -> Figure:
    return await asyncio.to_thread(_measure, 1 if quick else 8)


def _measure(windows: int) -> Figure:
    os.sched_setaffinity(0, cores().all)  # of this thread, and of those that the runners start from it
    torch.set_num_threads(len(cores().all))
    source = resolve_model("default", lambda _: None)
    config = read_config(source.directory)
    weights = load_weights(source.directory, config)
    tokenizer = Tokenizer.from_file(str(source.directory / "tokenizer.json"))
    text = gzip.decompress(_TEXT.read_bytes()).decode()
    ids = np.array(tokenizer.encode(text[: windows * _WINDOW * 8]).ids[: windows * _WINDOW], dtype=np.int32)
    texts = np.split(ids, windows)
    reference = TorchRunner(config, weights, _blocks(), _WINDOW)
    runners = {name: _fused(config, weights, *name) for name in _FORMATS}
    divergences: dict[tuple[str, str], list[float]] = {name: [] for name in _FORMATS}
    agreements: dict[tuple[str, str], list[float]] = {name: [] for name in _FORMATS}
    surprises: dict[tuple[str, str], list[float]] = {name: [] for name in [*_FORMATS, ("float32", "float32")]}
    for window in texts:
        expected = _distribution(reference, window)
        surprises["float32", "float32"].append(_surprise(expected, window))
        for name, runner in runners.items():
            got = _distribution(runner, window)
            divergences[name].append(float((expected.exp() * (expected - got)).sum(-1).mean()))
            agreements[name].append(float((expected.argmax(-1) == got.argmax(-1)).float().mean()))
            surprises[name].append(_surprise(got, window))
    rows = [
        Row(
            what=f"KL, weights {name[0]}, KV {name[1]}",
            unit="nats",
            rounds=tuple(divergences[name]),
            target=Target("most", 0.01) if name == ("int8", "float16") else None,
            beside=tuple(
                {"top-1": agreement, "perplexity": float(np.exp(surprise))}
                for agreement, surprise in zip(agreements[name], surprises[name], strict=True)
            ),
        )
        for name in _FORMATS
    ]
    median = float(np.exp(np.median(surprises["float32", "float32"])))
    method = _METHOD.format(windows=windows, window=_WINDOW, reference=median)
    return Figure(figure="quality", title="What formats lose", method=method, rows=tuple(rows))


def _blocks() -> int:
    return _WINDOW // BLOCK_SIZE


def _fused(config: ModelConfig, weights: ModelWeights, precision: str, kv: KVPrecision) -> ModelRunner:
    try:
        library = load_fused_library(lambda _: None)
        some = weights if precision == "float16" else rounded(weights, *_SCHEMES[precision])
        return FusedRunner(library, config, some, _blocks(), _WINDOW, len(cores().all), kv)
    except RunnerUnavailable as reason:
        raise CannotMeasure(f"The fused step is not available: {reason}") from reason


def _distribution(runner: ModelRunner, window: np.typing.NDArray[np.int32]) -> torch.Tensor:
    """Log-probabilities of the next token after each one, float32 [tokens, vocabulary]."""
    return runner.run(single_sequence_step(window, 0)).logits.log_softmax(-1)


def _surprise(log_probabilities: torch.Tensor, window: np.typing.NDArray[np.int32]) -> float:
    """Mean negative log-likelihood of the window's own tokens, in nats."""
    following = torch.from_numpy(window[1:]).long().unsqueeze(1)
    return float(-log_probabilities[:-1].gather(1, following).mean())
