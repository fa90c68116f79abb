"""The CUDA runner with quantised weights, its kernels interpreted, against the reference runner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from backend.model_loader.linears import Weight, as_floats, map_linears
from backend.model_loader.weights import Linear, ModelWeights, dense
from backend.quantized_weights.float_scheme import FloatScheme
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import CannotQuantize, Scheme
from backend.runners.cuda.runner import CudaRunner
from backend.runners.torch.runner import TorchRunner
from tests.backend.runners.cuda.random_model import CONFIG, STEPS, random_weights
from tests.backend.runners.cuda.references import relative_error

SMALL = dataclasses.replace(
    CONFIG, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=2, num_kv_heads=1, qkv_bias=True
)


def kept(scheme_of: Callable[[str], Scheme | None], head: Scheme | None = None) -> ModelWeights:
    """Random weights, each packed in the scheme of its name, or kept as floats for None."""

    def change(name: str, weight: Weight) -> Weight:
        scheme = scheme_of(name)
        return weight if scheme is None else scheme.pack(dense(weight))

    weights = map_linears(random_weights(SMALL), change)
    return weights if head is None else dataclasses.replace(weights, head=head.pack(dense(weights.head)))


def mixed(name: str) -> Scheme | None:
    """Query and key in one scheme, value in another; gate and up as floats, of which one is a FloatScheme."""
    if name.endswith(("q_proj", "k_proj")):
        return IntScheme(4, 32)
    schemes: dict[str, Scheme] = {
        "v_proj": IntScheme(8),
        "gate_proj": FloatScheme("float16"),
        "down_proj": Fp8Scheme("tensor"),
    }
    return schemes.get(name.rsplit(".", 1)[1])


def matches_the_reference(weights: ModelWeights, limit: float, dtype: torch.dtype = torch.float32) -> CudaRunner:
    """A runner that matches the reference over a prefill and a decode step, so with the kernels for many and for few
    rows.
    """
    runner = CudaRunner(SMALL, weights, 8, 64, 4, dtype, "cpu")
    reference = TorchRunner(SMALL, as_floats(weights), 8, 64)
    for step in (STEPS[0], STEPS[4]):
        got, expected = runner.run(step), reference.run(step)
        assert relative_error(got.logits, expected.logits) < limit
        assert got.hidden.shape == expected.hidden.shape
        assert not len(step.hidden_rows) or relative_error(got.hidden, expected.hidden) < limit
    return runner


def first_layer(runner: CudaRunner) -> Any:
    """The runner's first layer; private, but its matrices are what the joining of projections is about."""
    return runner.decoder._layers[0]


@pytest.mark.parametrize(
    ("scheme", "limit"),
    [
        (IntScheme(4, 64), 1e-5),
        (IntScheme(4, 32, "integer"), 1e-5),
        (IntScheme(8), 1e-5),
        (Nf4Scheme(), 2e-3),
        (Fp8Scheme(), 1e-5),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_logits_match_the_reference_on_the_unpacked_weights(scheme: Scheme, limit: float) -> None:
    """The logits match the reference on the unpacked weights, and projections with one input are one matrix."""
    runner = matches_the_reference(kept(lambda name: scheme, IntScheme(8)), limit)
    layer = first_layer(runner)
    assert [len(products) for products in (layer.qkv, layer.output, layer.gate_up, layer.down)] == [1, 1, 1, 1]
    assert runner.decoder.linears() == []


def test_rounded_activations_match_the_reference() -> None:
    """Activations are rounded as in the reference, up to values half way between two steps."""
    matches_the_reference(kept(lambda name: IntScheme(8, activation_bits=8)), 4e-3)


def test_schemes_that_differ_within_a_layer_are_multiplied_apart() -> None:
    """Projections of one scheme are one matrix, others are multiplied apart, and dense ones stay cuBLAS products."""
    runner = matches_the_reference(kept(mixed), 1e-5)
    layer = first_layer(runner)
    assert [len(products) for products in (layer.qkv, layer.output, layer.gate_up, layer.down)] == [2, 1, 1, 1]
    assert sum(isinstance(part, Linear) for part in layer.qkv + layer.output + layer.gate_up + layer.down) == 2
    assert len(runner.decoder.linears()) == 3


def test_quantised_weights_with_half_floats_stay_close() -> None:
    """Quantised weights with float16 activations stay close to the reference."""
    matches_the_reference(kept(lambda name: IntScheme(4, 32, "minimum")), 5e-3, torch.float16)


def test_projections_with_another_input_order_match() -> None:
    """Projections with permuted inputs match the reference, and are joined where they have one order."""
    weights = random_weights(SMALL)
    random = torch.Generator().manual_seed(5)
    orders = {name: torch.randperm(64, generator=random) for name in ("attention", "gate", "up")}

    def shuffled(name: str, weight: Weight) -> Weight:
        order = orders.get({"gate_proj": "gate", "up_proj": "up"}.get(name.rsplit(".", 1)[1], "attention"))
        if order is None or weight.shape[1] != 64:
            return weight
        scheme = IntScheme(4, 32)
        straight = scheme.pack(dense(weight)[:, order])
        return IntLinear.of(scheme, straight.plain_codes(), straight.grid, order.int())

    runner = matches_the_reference(map_linears(weights, shuffled), 1e-5)
    layer = first_layer(runner)
    assert (len(layer.qkv), len(layer.gate_up)) == (1, 2)


def test_the_runner_refuses_groups_without_a_kernel() -> None:
    """The runner refuses a group size without a kernel before it serves."""
    with pytest.raises(CannotQuantize, match="groups of 8 inputs"):
        CudaRunner(SMALL, kept(lambda name: IntScheme(4, 8)), 8, 64, 4, torch.float32, "cpu")
