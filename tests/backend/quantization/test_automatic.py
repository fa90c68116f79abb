"""The quantisation that is chosen by measurement."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import cast

import pytest

from backend.config import ModelConfig
from backend.errors import ModelError
from backend.quantization.automatic import fastest
from backend.quantization.names import Quantization
from backend.runner import ModelRunner, StepInput
from backend.weights import ModelWeights
from tests.backend.kernels.random_model import random_weights
from tests.backend.tiny_model import CONFIG


class Paced:
    """A runner whose steps take a time of their own for each layer, and another for the head."""

    def __init__(self, layers: int, layer_seconds: float, head_seconds: float) -> None:
        self._seconds = layers * layer_seconds + head_seconds

    def run(self, step: StepInput) -> None:
        time.sleep(self._seconds)


def choose(layer_and_head: Mapping[Quantization, tuple[float, float]], layers: int = 30) -> Quantization:
    weights = random_weights(CONFIG, seed=1)

    def make(name: Quantization, some: ModelConfig, its: ModelWeights) -> ModelRunner:
        if name not in layer_and_head:
            raise ModelError("not here")
        assert len(its.layers) == some.num_layers
        return cast(ModelRunner, Paced(some.num_layers, *layer_and_head[name]))

    many = dataclasses.replace(CONFIG, num_layers=layers)
    whole = dataclasses.replace(weights, layers=weights.layers[:1] * layers)
    name, shares = fastest(many, whole, ["none", "int8", "fp8"], [1, 8], make)
    assert shares["none"] == pytest.approx(1)
    assert shares.keys() == layer_and_head.keys()
    return name


def test_the_fastest_is_chosen() -> None:
    """By the steps of the runner that would serve."""
    assert choose({"none": (0.004, 0.001), "int8": (0.001, 0.001), "fp8": (0.003, 0.001)}) == "int8"


def test_a_few_layers_stand_for_all() -> None:
    """A slow head matters less the more layers there are."""
    assert choose({"none": (0.004, 0.0), "int8": (0.001, 0.01)}) == "int8"
    assert choose({"none": (0.004, 0.0), "int8": (0.001, 0.02)}, layers=4) == "none"


def test_what_gains_next_to_nothing_is_not_chosen() -> None:
    """Floats lose nothing, and a hundredth is chance."""
    assert choose({"none": (0.004, 0.0), "int8": (0.00396, 0.0)}) == "none"


def test_what_cannot_be_made_is_not_chosen() -> None:
    """As where a runner does not know a scheme; without the first there is no comparison."""
    assert choose({"none": (0.002, 0.0)}) == "none"
    with pytest.raises(ModelError, match="not here"):
        choose({"int8": (0.002, 0.0)})
