"""A model, loaded: what the HTTP side needs of it, and the runner that computes it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from backend.chat_template import ChatTemplate
from backend.config import EngineConfig, ModelConfig
from backend.detokenizer import TokenBytes
from backend.errors import ModelError
from backend.gguf_file import Progress
from backend.model_source import ModelSource
from backend.quantization.names import WITH_A_TEXT, Quantization
from backend.runner import BLOCK_SIZE, ModelRunner
from backend.sequence_blocks import blocks_at_most
from backend.weights import ModelWeights, load_weights, read_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from backend.quantization.summary import Summary

_NEARLY_LOSSLESS: tuple[Quantization, ...] = ("none", "int8")
_NEARLY_LOSSLESS_ON_CUDA: tuple[Quantization, ...] = (*_NEARLY_LOSSLESS, "fp8")
"""A CPU has no products of eight-bit floats, so there these lose more than int8 and are no faster."""
_MEASURED_BATCHES = (1, 8)
_MEASURED_KV_BYTES, _MEASURED_CONTEXT = 64 * 2**20, 64


@dataclass(frozen=True)
class TextSide:
    """Everything between text and token ids."""

    tokenizer: Tokenizer
    token_bytes: TokenBytes
    chat_template: ChatTemplate | None
    """None: a base model, which only completes."""

    @classmethod
    def load(cls, directory: Path, config: ModelConfig, chat_template: str | None = None) -> TextSide:
        """Reads ``tokenizer.json`` and the chat template, or takes ``chat_template`` in its place.

        Raises:
            ModelError: a file is missing or not supported.
        """
        # The setting concerns threads of the tokenizer's own; encoding one prompt never needs them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{directory}: no tokenizer.json here; expected a fast tokenizer")
        try:
            text = path.read_text("utf-8")
            tokenizer = Tokenizer.from_str(text)
            # Settings of whoever used it last, which files keep: prompts are refused where they are too long.
            tokenizer.no_truncation()
            tokenizer.no_padding()
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path}: not a tokenizer that can be loaded ({error})") from error
        return cls(tokenizer, TokenBytes(text, config.vocab_size), ChatTemplate.load(directory, chat_template))


@dataclass(frozen=True)
class ServedModel:
    """A model ready to serve under ``name``."""

    name: str
    config: ModelConfig
    text: TextSide
    runner: ModelRunner
    quantization: Summary | None
    """In what its weights are kept; None: they are floats."""
    max_context: int
    """Longest prompt plus answer, in tokens."""
    directory: Path
    """With the files of which it was made."""


def load_model(source: ModelSource, engine: EngineConfig, progress: Progress) -> ServedModel:
    """Loads tokenizer and weights and chooses the runner.

    Raises:
        ModelError: the model cannot be served, or the KV memory is too small for it.
    """
    if engine.quantization in WITH_A_TEXT:
        from backend.quantization.prepared import prepared

        source = prepared(source, engine.quantization, progress)
    progress(f"loading {source.name}")
    config = read_config(source.directory)
    text = TextSide.load(source.directory, config, source.chat_template)
    from backend.quantization.choice import quantised
    from backend.quantization.stated_loss import stated_loss
    from backend.runner_choice import choose_runner

    loss = stated_loss(source.directory)
    weights = load_weights(source.directory, config)
    if engine.quantization == "auto":
        engine = replace(engine, quantization=_fastest(config, weights, engine, progress))
    weights, quantization = quantised(weights, engine.quantization)
    wanted = min(engine.max_context or config.max_position_embeddings, config.max_position_embeddings)
    runner = choose_runner(config, weights, engine, wanted, progress)
    if quantization is not None:
        quantization = _served(replace(quantization, divergence=loss), runner, progress)
    longest = _longest_context(runner, engine, wanted)
    if longest < wanted:
        progress(f"the KV memory holds {longest} tokens, so that is the longest context")
    return ServedModel(source.name, config, text, runner, quantization, longest, source.directory)


def _served(quantization: Summary, runner: ModelRunner, progress: Progress) -> Summary:
    """As the runner has it."""
    from backend.fused_runner import FusedRunner

    if not isinstance(runner, FusedRunner):
        return quantization
    if widened := sorted(form for form in runner.weight_forms if "-as-" in form):
        progress(f"the fused step has no layout for some of the weights, and widens them: {', '.join(widened)}")
    return quantization.held(runner.weight_forms)


def _fastest(config: ModelConfig, weights: ModelWeights, engine: EngineConfig, progress: Progress) -> Quantization:
    """Of those that lose next to nothing the fastest here; what the model's files have, where that is quantised."""
    import torch

    from backend.quantization.automatic import fastest
    from backend.quantization.choice import quantised
    from backend.quantization.summary import summarise
    from backend.runner_choice import choose_runner

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
    if blocks_at_most(wanted, runner.config.sight, step_tokens) <= runner.num_blocks:
        return wanted
    return min(wanted, runner.num_blocks * BLOCK_SIZE)
