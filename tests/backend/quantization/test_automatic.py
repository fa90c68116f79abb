"""The quantisation that is chosen by measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import pytest

from backend.engine.model_runner import ModelRunner, StepInput
from backend.errors import ModelError
from backend.model_loader.weights import ModelWeights
from backend.models.config import ModelConfig
from backend.quantization.selection import automatic
from backend.quantization.selection.automatic import fastest
from backend.quantized_weights.names import Quantization
from tests.backend.runners.cuda.random_model import random_weights
from tests.backend.tiny_model import CONFIG


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that the test advances, in place of the machine's."""
    clock = Clock()
    monkeypatch.setattr(automatic, "time", clock)
    return clock


class Clock:
    """What steps have taken so far, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Paced:
    """A runner whose steps take a time of their own for each layer and for the head; every third stalls."""

    def __init__(self, clock: Clock, layers: int, layer_seconds: float, head_seconds: float) -> None:
        self._clock, self._steps = clock, 0
        self._seconds = layers * layer_seconds + head_seconds

    def run(self, step: StepInput) -> None:
        self._steps += 1
        self._clock.now += self._seconds * (10 if self._steps % 3 == 0 else 1)


def choose(
    clock: Clock, layer_and_head: Mapping[Quantization, tuple[float, float]], layers: int = 30
) -> tuple[Quantization, dict[Quantization, float]]:
    weights = random_weights(CONFIG, seed=1)

    def make(name: Quantization, some: ModelConfig, its: ModelWeights) -> ModelRunner:
        if name not in layer_and_head:
            raise ModelError("not here")
        assert len(its.layers) == some.num_layers
        return cast(ModelRunner, Paced(clock, some.num_layers, *layer_and_head[name]))

    many = dataclasses.replace(CONFIG, num_layers=layers)
    whole = dataclasses.replace(weights, layers=weights.layers[:1] * layers)
    name, shares = fastest(many, whole, ["none", "int8", "fp8"], [1, 8], make)
    assert shares["none"] == pytest.approx(1)
    assert shares.keys() == layer_and_head.keys()
    return name, shares


def test_the_fastest_quantization_is_chosen(clock: Clock) -> None:
    """The quantisation whose steps are fastest on the serving runner is chosen."""
    name, shares = choose(clock, {"none": (0.004, 0.001), "int8": (0.001, 0.001), "fp8": (0.003, 0.001)})
    assert name == "int8"
    assert shares == pytest.approx({"none": 1, "int8": 31 / 121, "fp8": 91 / 121})


def test_a_few_layers_stand_for_all(clock: Clock) -> None:
    """The times of a few layers are extrapolated to all layers, so a slow head counts less in a deep model."""
    assert choose(clock, {"none": (0.004, 0.0), "int8": (0.001, 0.01)})[0] == "int8"
    assert choose(clock, {"none": (0.004, 0.0), "int8": (0.001, 0.02)}, layers=4)[0] == "none"


def test_a_quantization_that_gains_one_percent_is_not_chosen(clock: Clock) -> None:
    """A quantisation that is faster by about one percent is not chosen, as floats lose nothing."""
    assert choose(clock, {"none": (0.004, 0.0), "int8": (0.00396, 0.0)})[0] == "none"
    assert choose(clock, {"none": (0.004, 0.0), "int8": (0.0037, 0.0)})[0] == "int8"


def test_a_quantization_without_a_runner_is_not_chosen(clock: Clock) -> None:
    """A quantisation that no runner supports is not chosen, and without the float model the choice is an error."""
    assert choose(clock, {"none": (0.002, 0.0)})[0] == "none"
    with pytest.raises(ModelError, match="not here"):
        choose(clock, {"int8": (0.002, 0.0)})
