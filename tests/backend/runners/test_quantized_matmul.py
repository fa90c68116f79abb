"""CPU products use the fastest kernel that is right."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch

from backend.model_loader.linears import map_linears
from backend.model_loader.weights import dense
from backend.quantization.selection.rounding import rounded
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.quantized_linear import QuantizedLinear, Scheme, reference
from backend.runners.self_test import steps
from backend.runners.torch import quantized_matmul
from backend.runners.torch.quantized_matmul import DEQUANTIZE, KernelTable, Matmul, QuantizedMatmul, kernel_factories
from backend.runners.torch.runner import TorchRunner
from tests.backend.quantization.schemes import IDS, SCHEMES
from tests.backend.runners.cuda.random_model import random_weights
from tests.backend.tiny_model import CONFIG


def packed(scheme: Scheme, rows: int = 96) -> QuantizedLinear:
    return scheme.pack(torch.randn(rows, 256, generator=torch.Generator().manual_seed(3)) * 0.05)


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chosen_kernel_is_right(scheme: Scheme, dtype: torch.dtype) -> None:
    """The chosen kernel is right for every number of rows, in the dtype of the activations."""
    linear = packed(scheme)
    product = QuantizedMatmul(linear, KernelTable())
    for rows in (1, 3, 4, 17, 64, 100):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to(dtype)
        got, expected = product(x), reference(linear, x)
        assert got.dtype == dtype
        assert float((got.double() - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("scheme", [IntScheme(4, 64), IntScheme(8), IntScheme(8, 64)], ids=["int4", "int8", "int8-g64"])
def test_columns_in_another_order_are_gathered(scheme: IntScheme) -> None:
    """Every kernel gathers permuted columns right."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(9)).int()
    linear = dataclasses.replace(scheme.pack(torch.randn(64, 256)), order=order)
    x = torch.randn(3, 256)
    expected = reference(linear, x)
    for name, make in kernel_factories(linear).items():
        assert float((make()(x).double() - expected).norm() / expected.norm()) < 0.01, name


def test_a_wrong_or_absent_kernel_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is wrong or absent on this machine is not chosen, however fast it is."""

    def with_worse(linear: QuantizedLinear) -> dict[str, object]:
        def nothing(x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(len(x), linear.shape[0])

        def absent() -> Matmul:
            raise RuntimeError("no such operator")

        return {DEQUANTIZE: lambda: linear.matmul, "wrong": lambda: nothing, "absent": absent}

    monkeypatch.setattr(quantized_matmul, "kernel_factories", with_worse)
    linear = packed(IntScheme(4, 32))
    assert KernelTable().choose(linear) == (DEQUANTIZE,) * 4
    x = torch.randn(2, 256)
    torch.testing.assert_close(QuantizedMatmul(linear, KernelTable())(x), linear.matmul(x))


@pytest.mark.parametrize("inputs", [4, 12, 20, 36, 44, 50, 100, 132, 300])
def test_inputs_that_fill_no_vector_are_multiplied(inputs: int) -> None:
    """Inputs that fill no vector are multiplied by dequantising, as other operators would read beyond them."""
    linear = IntScheme(8).pack(torch.randn(7, inputs, generator=torch.Generator().manual_seed(inputs)))
    assert set(kernel_factories(linear)) == {DEQUANTIZE}
    product = QuantizedMatmul(linear, KernelTable())
    for rows in (1, 2, 5, 64):
        x = torch.randn(rows, inputs)
        torch.testing.assert_close(product(x).double(), reference(linear, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("activation_bits", "count"), [(8, 1), (16, 2)])
def test_rounded_activations_use_one_kernel_for_every_batch(
    activation_bits: Literal[8, 16], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rounded activations one kernel serves every batch size, so a row's result does not depend on the batch."""
    linear = packed(IntScheme(8, activation_bits=activation_bits))

    def twin(x: torch.Tensor) -> torch.Tensor:
        return linear.matmul(x)

    def seconds(product: Matmul, rows: int, _: int) -> float:
        return 1.0 if (product is twin) == (rows < 16) else 2.0

    monkeypatch.setattr(
        quantized_matmul, "kernel_factories", lambda _: {DEQUANTIZE: lambda: linear.matmul, "twin": lambda: twin}
    )
    # Measured times differ from run to run, so the private measurement is replaced.
    monkeypatch.setattr(quantized_matmul, "_seconds", seconds)
    assert len(set(KernelTable().choose(linear))) == count


def test_a_shape_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a shape are measured once for all layers."""
    # Measuring again would show in nothing but time, so the private function that measures is recorded.
    measured: list[tuple[int, int]] = []
    whole = quantized_matmul._fastest_kernels

    def noted(linear: QuantizedLinear) -> tuple[str, ...]:
        measured.append(linear.shape)
        return whole(linear)

    monkeypatch.setattr(quantized_matmul, "_fastest_kernels", noted)
    table = KernelTable()
    for rows in (32, 64, 32):
        QuantizedMatmul(packed(IntScheme(4, 32), rows), table)
    assert measured == [(32, 256), (64, 256)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
def test_the_torch_runner_matches_its_dense_weights(scheme: Scheme) -> None:
    """The torch runner with quantised layers and head matches its dense weights up to the rounding of activations."""
    config = dataclasses.replace(CONFIG, intermediate_size=256)
    model = rounded(random_weights(config, seed=5), scheme, IntScheme(8))
    plain = dataclasses.replace(map_linears(model, lambda name, weight: dense(weight)), head=dense(model.head))
    quantized, reference_runner = (TorchRunner(config, one, 8, 64) for one in (model, plain))
    for step in steps(config.vocab_size):
        got, expected = quantized.run(step).logits, reference_runner.run(step).logits
        assert float((got - expected).norm() / expected.norm()) < 0.06
