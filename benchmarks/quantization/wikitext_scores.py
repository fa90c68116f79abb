"""What models say of WikiText-2's test split, beside what the unquantised one says."""

import gzip
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner
from backend.evaluation.perplexity import perplexity
from backend.evaluation.scores import Scores, score, windows
from backend.model_loader.linears import Weight, map_linears
from backend.model_loader.source import ModelSource
from backend.model_loader.weights import ModelWeights, dense
from backend.models.config import ModelConfig
from backend.quantization.methods.fitting import fitting
from backend.quantized_weights.float_scheme import FloatScheme
from backend.quantized_weights.quantized_linear import Scheme
from backend.runners.errors import RunnerUnavailable
from backend.runners.fused.build import load_fused_library
from backend.runners.fused.runner import FusedRunner
from backend.runners.torch.runner import TorchRunner
from benchmarks.harness.processes import CannotMeasure, cores

WINDOW, STRIDE = 512, 256
BF16 = FloatScheme("bfloat16")
_TEXT = Path(__file__).resolve().parents[1] / "data" / "wikitext-2" / "test.txt.gz"


def wikitext_tokens(source: ModelSource, count: int) -> npt.NDArray[np.int32]:
    """The first tokens of the text, and one before that is not scored: int32 [count + 1]."""
    tokenizer = Tokenizer.from_file(str(source.directory / "tokenizer.json"))
    text = gzip.decompress(_TEXT.read_bytes()).decode()
    return np.array(tokenizer.encode(text).ids[: count + 1], dtype=np.int32)


def rounded(weights: ModelWeights, scheme: Scheme) -> ModelWeights:
    """The matrices of all layers to the nearest, in smaller groups where those of the scheme do not fit."""

    def pack(name: str, weight: Weight) -> Weight:
        fits, _ = fitting(scheme, weight.shape[0], weight.shape[1], BF16)
        return fits.pack(dense(weight))

    return map_linears(weights, pack)


def runner_of_bits(config: ModelConfig, packed: ModelWeights, rounds_activations: bool = False) -> ModelRunner:
    """Multiplies what the bits of weights say, in half floats where it does not round activations."""
    blocks = WINDOW // BLOCK_SIZE
    if rounds_activations:
        return TorchRunner(config, packed, blocks, WINDOW)
    try:
        library = load_fused_library(lambda _: None)
        unpacked = map_linears(packed, lambda _, weight: dense(weight))
        return FusedRunner(library, config, unpacked, blocks, WINDOW, len(cores().all))
    except RunnerUnavailable as reason:
        raise CannotMeasure(f"The fused step is not available: {reason}") from reason


def scores_of(tokens: npt.NDArray[np.int32], reference: ModelRunner, others: list[ModelRunner]) -> list[Scores]:
    """Of the reference, then of the others."""
    parts = [score(tokens, window, reference, others) for window in windows(len(tokens), WINDOW, STRIDE)]
    return [Scores.joined(of_one) for of_one in zip(*parts, strict=True)]


def rise(scores: Scores, reference: Scores) -> float:
    """Of the perplexity over that of the reference, in %."""
    return 100 * (perplexity(scores) / perplexity(reference) - 1)
