"""What ``--quantization`` does to a model's weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backend.model_loader.linears import linears
from backend.model_loader.weights import ModelWeights
from backend.quantization.selection.choice import ROUNDINGS, quantised
from backend.quantization.selection.prepared import RECIPES
from backend.quantized_weights.names import CALIBRATED_QUANTIZATIONS
from backend.quantized_weights.quantized_linear import CannotQuantize
from tests.backend.runners.cuda.random_model import random_weights
from tests.backend.tiny_model import CONFIG

WIDE = dataclasses.replace(CONFIG, intermediate_size=256)


@pytest.fixture
def weights() -> ModelWeights:
    return random_weights(WIDE, seed=2)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_each_name_packs_layers_and_head_in_its_schemes(weights: ModelWeights, name: str) -> None:
    """Each name packs the layers and the head in its schemes, and the summary has the relative error."""
    layers, head = ROUNDINGS[name]
    packed, summary = quantised(weights, name)
    assert {weight.scheme for weight in linears(packed).values() if not isinstance(weight, torch.Tensor)} == {layers}
    assert not isinstance(packed.head, torch.Tensor)
    assert packed.head.scheme == head
    assert summary is not None
    assert sum(summary.schemes.values()) == 7 * WIDE.num_layers + 1
    assert summary.relative_error is not None
    assert 0.001 < summary.relative_error < 0.15


def test_none_leaves_a_model_as_it_is(weights: ModelWeights) -> None:
    """`none` leaves float and quantised weights as they are, the latter with their summary."""
    assert quantised(weights, "none") == (weights, None)
    packed, summary = quantised(weights, "int4")
    again, same = quantised(packed, "none")
    assert again is packed
    assert summary is not None
    assert same == dataclasses.replace(summary, relative_error=None)


def test_quantised_weights_are_not_rounded_again(weights: ModelWeights) -> None:
    """Quantised weights are refused instead of rounded again."""
    packed, _ = quantised(weights, "nf4")
    with pytest.raises(
        CannotQuantize, match=r"--quantization int8: .* quantised already \(nf4, int8-g64\); expected none"
    ):
        quantised(packed, "int8")


def test_a_model_that_does_not_fit_is_refused_by_name() -> None:
    """A matrix that does not fit a scheme is refused with the option, the matrix and what the scheme needs."""
    odd = random_weights(CONFIG, seed=2)
    with pytest.raises(CannotQuantize, match=r"--quantization nf4: model.layers.0.mlp.down_proj: nf4 needs .* are 160"):
        quantised(odd, "nf4")


def test_every_calibrated_name_has_a_recipe() -> None:
    """Every calibrated quantisation has a recipe, and there is no other recipe."""
    assert set(RECIPES) == CALIBRATED_QUANTIZATIONS
