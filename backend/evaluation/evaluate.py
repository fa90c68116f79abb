"""Evaluates a model on a text, from the model's name to the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backend.engine.config import EngineConfig
from backend.engine.model_runner import BLOCK_SIZE
from backend.errors import ModelError
from backend.evaluation.perplexity import OnWindow, evaluate
from backend.evaluation.report import Report
from backend.model import ServedModel, load_model
from backend.model_loader.source import ModelSource, resolve_model
from backend.model_loader.weights import read_config
from backend.models.sizes import count_parameters, kv_bytes_per_token
from backend.text.token_ids import token_ids, unknown_token


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """A model, a text and how to score it."""

    model: str
    """A name for `resolve_model`, as is ``reference``."""
    reference: str | None
    """None: the same model without quantisation if ``engine`` quantises it, else no reference."""
    text: str
    text_name: str
    """Its file's name."""
    engine: EngineConfig
    window: int
    stride: int
    limit: int | None
    """Number of tokens to score; None: all."""


def evaluate_model(config: EvaluationConfig, progress: Callable[[str], None], on_window: OnWindow) -> Report:
    """Loads the model and its reference, and scores the text.

    Raises:
        ModelError: the text, the model or the reference cannot be evaluated; the message says which.
    """
    source = resolve_model(config.model, progress)
    reference_source = _reference(config, source, progress)
    model = _load(source, config, config.engine, progress)
    tokens = _tokens(model, config)
    reference = None
    if reference_source is not None:
        unquantised = dataclasses.replace(config.engine, quantization="none")
        reference = _load(reference_source, config, unquantised, progress)
        _check_same_tokens(tokens, _tokens(reference, config), model, reference)
    evaluation = evaluate(
        tokens, model.runner, None if reference is None else reference.runner, config.window, config.stride, on_window
    )
    bits_per_weight, weight_bytes = _size(model)
    return Report(
        model=model.name,
        text=config.text_name,
        scheme=config.engine.quantization,
        runner=model.runner.name,
        reference=None if reference is None else reference.name,
        reference_runner=None if reference is None else reference.runner.name,
        window=config.window,
        stride=config.stride,
        evaluation=evaluation,
        schemes={} if model.quantization is None else model.quantization.schemes,
        bits_per_weight=bits_per_weight,
        weight_bytes=weight_bytes,
    )


def _size(model: ServedModel) -> tuple[float, int]:
    """Bits per weight and total bytes of the layers' matrices and the head."""
    if model.quantization is not None:
        return model.quantization.bits_per_weight, model.quantization.weight_bytes
    parameters = count_parameters(model.config)
    size = 4 if model.runner.weights_precision == "float32" else 2
    return 8.0 * size, size * (parameters.layers + parameters.embedding)


def _reference(config: EvaluationConfig, source: ModelSource, progress: Callable[[str], None]) -> ModelSource | None:
    if config.reference is not None:
        return resolve_model(config.reference, progress)
    return None if config.engine.quantization == "none" else source


def _load(
    source: ModelSource, config: EvaluationConfig, engine: EngineConfig, progress: Callable[[str], None]
) -> ServedModel:
    """Loads a model with KV memory for one window only: model and reference share the device."""
    model_config = read_config(source.directory)
    if config.window > model_config.max_position_embeddings:
        raise ModelError(
            f"--window: {config.window} tokens are more than the {model_config.max_position_embeddings} that "
            f"{source.name} was made for"
        )
    positions = -(-config.window // BLOCK_SIZE) * BLOCK_SIZE
    kv_memory = positions * kv_bytes_per_token(model_config, "float32")
    engine = dataclasses.replace(engine, max_context=config.window, max_batch=1, kv_memory=kv_memory)
    return load_model(source, engine, progress)


def _tokens(model: ServedModel, config: EvaluationConfig) -> npt.NDArray[np.int32]:
    """Token ids of the text: those to score and the first one."""
    ids = token_ids(model.tokenizer.fast, config.text)
    if len(ids) < 2:
        raise ModelError(f"{config.text_name}: too short: {len(ids)} token for {model.name}, expected 2 or more")
    if (unknown := unknown_token(model.tokenizer.fast, ids, model.config.vocab_size)) is not None:
        raise ModelError(f"{config.text_name}: {unknown}; expected a text without it")
    return np.array(ids if config.limit is None else ids[: config.limit + 1], dtype=np.int32)


def _check_same_tokens(
    ours: npt.NDArray[np.int32], theirs: npt.NDArray[np.int32], model: ServedModel, reference: ServedModel
) -> None:
    if model.config.vocab_size != reference.config.vocab_size or not np.array_equal(ours, theirs):
        raise ModelError(
            f"--reference: {reference.name} has other tokens than {model.name}, so there is nothing to compare; "
            "expected the model that it was made from"
        )
