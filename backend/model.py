"""A model, loaded: what the HTTP side needs of it, and the runner that computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from backend.chat.tokenizer import ModelTokenizer
from backend.checkpoints.gguf.convert import Progress
from backend.engine.block_manager import blocks_at_most
from backend.engine.config import EngineConfig
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner
from backend.errors import ModelError
from backend.model_loader.source import ModelSource
from backend.model_loader.weights import ModelWeights, load_weights, read_config
from backend.models.config import ModelConfig
from backend.models.generation_config import SamplingDefaults, read_sampling_defaults
from backend.models.json_file import read_json_object
from backend.models.partition import ModelPart
from backend.quantized_weights.names import CALIBRATED_QUANTIZATIONS, Quantization

if TYPE_CHECKING:
    from backend.quantization.selection.summary import Summary
    from backend.runners.parallel.runner import ParallelRunner

_NEARLY_LOSSLESS: tuple[Quantization, ...] = ("none", "int8")
_NEARLY_LOSSLESS_ON_CUDA: tuple[Quantization, ...] = (*_NEARLY_LOSSLESS, "fp8")
"""A CPU has no products of eight-bit floats, so there these lose more than int8 and are no faster."""
_MEASURED_BATCHES = (1, 8)
_MEASURED_KV_BYTES, _MEASURED_CONTEXT = 64 * 2**20, 64


@dataclass(frozen=True)
class ServedModel:
    """A model ready to serve under ``name``."""

    name: str
    config: ModelConfig
    tokenizer: ModelTokenizer
    runner: ModelRunner
    quantization: Summary | None
    """In what its weights are kept; None: they are floats."""
    max_context: int
    """Longest prompt plus answer, in tokens."""
    directory: Path
    """With the files of which it was made."""
    sampling: SamplingDefaults
    """Of requests that leave fields out."""
    parallel: ParallelRunner | None = None
    """``runner``, where it has other processes; they end with its ``close``."""


def load_part(
    directory: Path, config: ModelConfig, part: ModelPart, quantization: Quantization
) -> tuple[ModelWeights, Summary | None]:
    """The weights of one rank, and in what they are kept; None: they are floats.

    Raises:
        ModelError: they cannot be read or rounded.
    """
    from backend.quantization.selection.choice import scheme_of
    from backend.quantization.selection.summary import summarise

    weights = load_weights(directory, config, part, scheme_of(quantization))
    return weights, summarise(weights)


def load_model(source: ModelSource, engine: EngineConfig, progress: Progress) -> ServedModel:
    """Loads tokenizer and weights and chooses the runner.

    Raises:
        ModelError: the model cannot be served, or the KV memory is too small for it.
    """
    if engine.quantization in CALIBRATED_QUANTIZATIONS:
        from backend.quantization.selection.prepared import prepared

        source = prepared(source, engine.quantization, progress)
    progress(f"loading {source.name}")
    config = read_config(source.directory)
    tokenizer = ModelTokenizer.load(source.directory, config, source.chat_template)
    sampling = read_sampling_defaults(source.directory)
    wanted = min(engine.max_context or config.max_position_embeddings, config.max_position_embeddings)
    if engine.tensor_parallel * engine.pipeline_parallel > 1:
        return _load_parallel(source, config, tokenizer, sampling, engine, wanted, progress)
    from backend.quantization.selection.choice import quantised
    from backend.quantization.selection.stated_loss import stated_loss
    from backend.runners.choice import choose_runner

    loss = stated_loss(source.directory)
    weights = load_weights(source.directory, config)
    if engine.quantization == "auto":
        engine = replace(engine, quantization=_fastest(config, weights, engine, progress))
    weights, quantization = quantised(weights, engine.quantization)
    runner = choose_runner(config, weights, engine, wanted, progress)
    if quantization is not None:
        quantization = _served(replace(quantization, divergence=loss), runner, progress)
    longest = _longest_context(runner, engine, wanted)
    if longest < wanted:
        progress(f"the KV memory holds {longest} tokens, so that is the longest context")
    return ServedModel(source.name, config, tokenizer, runner, quantization, longest, source.directory, sampling)


def _load_parallel(
    source: ModelSource,
    config: ModelConfig,
    tokenizer: ModelTokenizer,
    sampling: SamplingDefaults,
    engine: EngineConfig,
    wanted: int,
    progress: Progress,
) -> ServedModel:
    """Starts the other ranks, while this one loads its own part."""
    from backend.quantization.selection.stated_loss import stated_loss
    from backend.quantization.selection.summary import Summary, joined
    from backend.runners.choice import choose_parallel
    from backend.runners.parallel.runner import ParallelRunner

    if engine.quantization == "auto":
        raise ModelError(
            "--quantization auto: what is the fastest is not measured in parallel, expected none, int8 or another name"
        )
    _refuse_to_round_again(source.directory, engine.quantization)
    shape = config.with_max_context(wanted)
    settings = choose_parallel(shape, engine, wanted, progress)
    summaries: list[Summary | None] = []

    def load(part: ModelPart) -> ModelWeights:
        weights, summary = load_part(source.directory, shape, part, engine.quantization)
        summaries.append(summary)
        return weights

    progress(f"starting {len(settings.parts)} ranks")
    runner = ParallelRunner(shape, source.directory, settings, load, progress)
    summaries += [about if isinstance(about, Summary) else None for about in runner.abouts]
    quantization = joined(list(zip(settings.parts, summaries, strict=True)))
    if quantization is not None:
        quantization = replace(quantization, divergence=stated_loss(source.directory))
    longest = _longest_context(runner, engine, wanted)
    if longest < wanted:
        progress(f"the KV memory holds {longest} tokens, so that is the longest context")
    return ServedModel(
        source.name, config, tokenizer, runner, quantization, longest, source.directory, sampling, runner
    )


def _refuse_to_round_again(directory: Path, quantization: Quantization) -> None:
    """Raises ModelError if weights that the files have quantised already are to be rounded."""
    from backend.checkpoints.quantized.registry import quantization_config

    kept = quantization_config(read_json_object(directory / "config.json"))
    if kept is not None and quantization not in ("none", *CALIBRATED_QUANTIZATIONS):
        raise ModelError(
            f"--quantization {quantization}: the model's files are quantised already ({kept.get('quant_method')}); "
            "expected none"
        )


def _served(quantization: Summary, runner: ModelRunner, progress: Progress) -> Summary:
    """As the runner has it."""
    from backend.runners.fused.runner import FusedRunner

    if not isinstance(runner, FusedRunner):
        return quantization
    if widened := sorted(form for form in runner.weight_bytes if "-as-" in form):
        progress(f"the fused step has no layout for some of the weights, and widens them: {', '.join(widened)}")
    return quantization.held(runner.weight_bytes)


def _fastest(config: ModelConfig, weights: ModelWeights, engine: EngineConfig, progress: Progress) -> Quantization:
    """Of those that lose next to nothing the fastest here; what the model's files have, where that is quantised."""
    import torch

    from backend.quantization.selection.automatic import fastest
    from backend.quantization.selection.choice import quantised
    from backend.quantization.selection.summary import summarise
    from backend.runners.choice import choose_runner

    if summarise(weights) is not None:
        return "none"
    few = replace(engine, kv_memory=_MEASURED_KV_BYTES, max_context=_MEASURED_CONTEXT)

    def make(name: Quantization, some: ModelConfig, its: ModelWeights) -> ModelRunner:
        packed, _ = quantised(its, name)
        return choose_runner(some, packed, replace(few, quantization=name), _MEASURED_CONTEXT, lambda sentence: None)

    on_cuda = engine.device != "cpu" and torch.cuda.is_available()
    candidates = _NEARLY_LOSSLESS_ON_CUDA if on_cuda else _NEARLY_LOSSLESS
    name, shares = fastest(config, weights, candidates, _MEASURED_BATCHES, make)
    said = ", ".join(f"{candidate} {share:.2f}" for candidate, share in shares.items())
    progress(f"--quantization auto: {name}, for steps take ({said})")
    return name


def _longest_context(runner: ModelRunner, engine: EngineConfig, wanted: int) -> int:
    """What the KV memory holds of one sequence; all that is wanted, if it holds the windows of all layers."""
    step_tokens = max(engine.step_tokens or runner.step_tokens, engine.max_batch or runner.max_batch)
    if blocks_at_most(wanted, runner.config.attention_window, step_tokens) <= runner.num_blocks:
        return wanted
    return min(wanted, runner.num_blocks * BLOCK_SIZE)
