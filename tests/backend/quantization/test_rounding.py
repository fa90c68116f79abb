"""Rounding a whole model: the weights that it packs, their size, and the error for one that does not fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backend.model_loader.linears import linears
from backend.model_loader.weights import ModelWeights, dense
from backend.quantization.selection.rounding import rounded
from backend.quantization.selection.summary import RoundingError, summarise
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.quantized_linear import CannotQuantize
from tests.backend.runners.cuda.random_model import random_weights
from tests.backend.tiny_model import CONFIG

INT4, INT8 = IntScheme(4, 32), IntScheme(8)


@pytest.fixture
def weights() -> ModelWeights:
    return random_weights(CONFIG, seed=3)


def test_every_linear_layer_is_rounded_and_nothing_else(weights: ModelWeights) -> None:
    """Rounding packs every linear layer and the head, and leaves embedding, norms and biases the same tensors."""
    packed = rounded(weights, INT4, INT8)
    assert len(linears(packed)) == 7 * CONFIG.num_layers
    assert linears(packed)["model.layers.1.mlp.down_proj"] is packed.layers[1].down.weight
    summary = summarise(packed)
    assert summary is not None
    assert summary.schemes == {"int4-g32": 7 * CONFIG.num_layers, "int8": 1}
    assert packed.embedding is weights.embedding
    assert packed.norm is weights.norm
    assert all(new.input_norm is old.input_norm for new, old in zip(packed.layers, weights.layers, strict=True))


def test_packed_weights_stay_as_they_are(weights: ModelWeights) -> None:
    """Weights that are packed already stay as they are."""
    once = rounded(weights, INT4)
    again = rounded(once, INT8, INT8)
    assert all(new.query.weight is old.query.weight for new, old in zip(again.layers, once.layers, strict=True))


def test_the_summary_adds_up(weights: ModelWeights) -> None:
    """The summary's bytes, bits and relative error are those of the weights."""
    error = RoundingError()
    packed = rounded(weights, INT4, None, error)
    summary = summarise(packed, error.relative)
    assert summary is not None
    before, after = ({name: dense(weight) for name, weight in linears(of).items()} for of in (weights, packed))
    lost = float(sum((after[name] - before[name]).square().sum() for name in before))
    whole = float(sum(weight.square().sum() for weight in before.values()))
    assert summary.relative_error == pytest.approx((lost / whole) ** 0.5, rel=1e-4)
    assert 0.03 < (lost / whole) ** 0.5 < 0.2
    head = 2 * weights.embedding.numel()
    assert summary.weight_bytes == sum(weight.nbytes for weight in linears(packed).values()) + head
    assert summary.half_bytes == 2 * sum(weight.numel() for weight in before.values()) + head
    assert summary.bits_per_weight == 16 * summary.weight_bytes / summary.half_bytes


def test_a_model_of_floats_has_no_summary(weights: ModelWeights) -> None:
    """A model of floats has no summary."""
    assert summarise(weights) is None


def test_a_weight_that_does_not_fit_is_named(weights: ModelWeights) -> None:
    """A weight that does not fit its scheme is named as in its file."""
    with pytest.raises(CannotQuantize, match=r"model.layers.0.mlp.down_proj: int4-g128 needs .* and these are 160"):
        rounded(weights, IntScheme(4, 128))
    layer = weights.layers[1]
    broken = dataclasses.replace(layer.key, weight=torch.full_like(layer.key.dense, torch.inf))
    spoilt = dataclasses.replace(weights, layers=(weights.layers[0], dataclasses.replace(layer, key=broken)))
    with pytest.raises(CannotQuantize, match=r"model.layers.1.self_attn.k_proj: a weight is not a finite number"):
        rounded(spoilt, INT4)
