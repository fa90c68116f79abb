"""From a model's name and a file of text to a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backend.engine.config import EngineConfig
from backend.engine.model_runner import BLOCK_SIZE
from backend.errors import ModelError
from backend.evaluation.evaluation import Scored, evaluate
from backend.evaluation.report import Report
from backend.model import ServedModel, load_model
from backend.model_loader.source import ModelSource, resolve_model
from backend.model_loader.weights import read_config
from backend.models.sizes import count_parameters, kv_bytes_per_token
from backend.text.token_ids import token_ids, unknown_token


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be evaluated."""

    model: str
    """As `resolve_model` takes it, and so is ``reference``."""
    reference: str | None
    """None: the model itself unquantised, where the engine is to quantise it, else nothing."""
    text: str
    text_name: str
    """Of its file."""
    engine: EngineConfig
    window: int
    stride: int
    limit: int | None
    """Tokens to score at most; None: all of the text."""


def evaluate_model(question: Question, progress: Callable[[str], None], scored: Scored) -> Report:
    """Loads the model, and what it is compared with, and scores the text.

    Raises:
        ModelError: the text, the model or the reference is not what can be evaluated; the message says which.
    """
    source = resolve_model(question.model, progress)
    of_reference = _reference(question, source, progress)
    model = _load(source, question, question.engine, progress)
    tokens = _tokens(model, question)
    reference = None
    if of_reference is not None:
        unquantised = dataclasses.replace(question.engine, quantization="none")
        reference = _load(of_reference, question, unquantised, progress)
        _check_same_tokens(tokens, _tokens(reference, question), model, reference)
    evaluation = evaluate(
        tokens, model.runner, None if reference is None else reference.runner, question.window, question.stride, scored
    )
    bits_per_weight, weight_bytes = _size(model)
    return Report(
        model=model.name,
        text=question.text_name,
        scheme=question.engine.quantization,
        runner=model.runner.name,
        reference=None if reference is None else reference.name,
        reference_runner=None if reference is None else reference.runner.name,
        window=question.window,
        stride=question.stride,
        evaluation=evaluation,
        schemes={} if model.quantization is None else model.quantization.schemes,
        bits_per_weight=bits_per_weight,
        weight_bytes=weight_bytes,
    )


def _size(model: ServedModel) -> tuple[float, int]:
    """Bits for each weight of the layers' matrices and the head, and bytes of all of them."""
    if model.quantization is not None:
        return model.quantization.bits_per_weight, model.quantization.weight_bytes
    parameters = count_parameters(model.config)
    size = 4 if model.runner.weights_precision == "float32" else 2
    return 8.0 * size, size * (parameters.layers + parameters.embedding)


def _reference(question: Question, source: ModelSource, progress: Callable[[str], None]) -> ModelSource | None:
    if question.reference is not None:
        return resolve_model(question.reference, progress)
    return None if question.engine.quantization == "none" else source


def _load(
    source: ModelSource, question: Question, engine: EngineConfig, progress: Callable[[str], None]
) -> ServedModel:
    """The model with room for one window; two of them have to fit a device."""
    config = read_config(source.directory)
    if question.window > config.max_position_embeddings:
        raise ModelError(
            f"--window: {question.window} tokens are more than the {config.max_position_embeddings} that "
            f"{source.name} was made for"
        )
    positions = -(-question.window // BLOCK_SIZE) * BLOCK_SIZE
    kv_memory = positions * kv_bytes_per_token(config, "float32")
    engine = dataclasses.replace(engine, max_context=question.window, max_batch=1, kv_memory=kv_memory)
    return load_model(source, engine, progress)


def _tokens(model: ServedModel, question: Question) -> npt.NDArray[np.int32]:
    """Token ids of the text, as many as are to be scored and the one before them."""
    ids = token_ids(model.tokenizer.fast, question.text)
    if len(ids) < 2:
        raise ModelError(f"{question.text_name}: too short: {len(ids)} token for {model.name}, expected 2 or more")
    if (unknown := unknown_token(model.tokenizer.fast, ids, model.config.vocab_size)) is not None:
        raise ModelError(f"{question.text_name}: {unknown}; expected a text without it")
    return np.array(ids if question.limit is None else ids[: question.limit + 1], dtype=np.int32)


def _check_same_tokens(
    ours: npt.NDArray[np.int32], theirs: npt.NDArray[np.int32], model: ServedModel, reference: ServedModel
) -> None:
    if model.config.vocab_size != reference.config.vocab_size or not np.array_equal(ours, theirs):
        raise ModelError(
            f"--reference: {reference.name} has other tokens than {model.name}, so there is nothing to compare; "
            "expected the model that it was made from"
        )
