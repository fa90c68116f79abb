"""Products with quantised weights on a device, at sizes of real layers and in bfloat16."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backend.engine.config import EngineConfig
from backend.engine.model_runner import BLOCK_SIZE
from backend.kernels.fp8_gemm import fp8_gemm, round_rows, supports_fp8_gemm
from backend.kernels.quantized_matmul import DEQUANTIZE_MIN_ROWS, QuantizedMatmul
from backend.kernels.quantized_weight import on_device
from backend.model_loader.linears import as_floats, map_linears
from backend.model_loader.weights import ModelWeights, dense
from backend.quantized_weights.float_scheme import FloatScheme
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import Scheme
from backend.runners.cuda.choice import choose_cuda
from backend.runners.cuda.runner import CudaRunner
from backend.runners.torch.runner import TorchRunner
from tests.backend.runners.cuda.random_model import CONFIG, STEPS, random_weights
from tests.backend.runners.cuda.references import TOLERANCE, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")
SCHEMES: tuple[Scheme, ...] = (
    IntScheme(4, 128),
    IntScheme(4, 64, "integer"),
    IntScheme(4, 32, "minimum"),
    IntScheme(8),
    IntScheme(8, activation_bits=8),
    IntScheme(8, 32, "minimum"),
    IntScheme(8, 16),
    Nf4Scheme(),
    Fp8Scheme("row"),
    Fp8Scheme("tensor"),
)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=[scheme.name for scheme in SCHEMES])
WIDE = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=384)


def quantised(scheme: Scheme) -> ModelWeights:
    """Random weights in a scheme, with the head."""
    weights = map_linears(random_weights(WIDE), lambda name, weight: scheme.pack(dense(weight)))
    return dataclasses.replace(weights, head=scheme.pack(dense(weights.head)))


@every_scheme
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1000, 1152)])
def test_products_match_float64_on_a_device(scheme: Scheme, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """Products of every kernel match float64 for any number of rows, and are bitwise repeatable."""
    random = torch.Generator().manual_seed(0)
    linear = scheme.pack(torch.randn(outputs, inputs, generator=random) * 0.02)
    product = QuantizedMatmul(on_device(linear, CUDA), None)
    weight = linear.unpack().cuda().double()
    # Levels and scales of NF4 are half floats; rows that are rounded may be rounded to the other side.
    coarse = isinstance(scheme, Nf4Scheme) or scheme.activation_bits == 8
    limit = max(TOLERANCE[dtype], 2e-3 if coarse else 0)
    for rows in (1, 2, 3, 4, 5, 16, 17, 33, 64, 65, 100, DEQUANTIZE_MIN_ROWS - 1, DEQUANTIZE_MIN_ROWS, 300):
        x = torch.randn(rows, inputs, generator=random).to(CUDA, dtype)
        seen = x.double()
        if scheme.activation_bits == 8:
            scales = seen.abs().amax(1, keepdim=True) / 127
            seen = torch.round(seen / scales) * scales
        got = product(x)
        assert relative_error(got, seen @ weight.T) < limit, rows
        assert torch.equal(product(x), got), rows


def test_products_with_another_column_order_on_a_device() -> None:
    """Products with permuted columns match float64 for every kernel."""
    scheme, random = IntScheme(4, 128), torch.Generator().manual_seed(1)
    weight, order = torch.randn(512, 1024, generator=random), torch.randperm(1024, generator=random)
    straight = scheme.pack(weight[:, order])
    linear = IntLinear.of(scheme, straight.plain_codes(), straight.grid, order.int())
    product, expected = QuantizedMatmul(on_device(linear, CUDA), None), linear.unpack().cuda().double()
    for rows in (1, 8, 64, DEQUANTIZE_MIN_ROWS):
        x = torch.randn(rows, 1024, generator=random).to(CUDA, torch.bfloat16)
        assert relative_error(product(x), x.double() @ expected.T) < TOLERANCE[torch.bfloat16]


def test_fp8_products_multiply_rounded_rows() -> None:
    """Rows are rounded to the nearest FP8 values, and the product is that of the rounded rows."""
    if not supports_fp8_gemm(CUDA):
        pytest.skip("needs a GPU")
    random = torch.Generator().manual_seed(2)
    for scheme in (Fp8Scheme("row"), Fp8Scheme("tensor")):
        linear = scheme.pack(torch.randn(512, 1000, generator=random))
        weight = on_device(linear, CUDA)
        x = torch.randn(100, 1000, generator=random).to(CUDA, torch.bfloat16)
        rounded, scales = round_rows(x, weight)
        assert torch.allclose(scales, x.float().abs().amax(1, keepdim=True) / 448)
        in_order = rounded.float().view(100, -1, 32, 4).transpose(2, 3).reshape(100, -1)[:, :1000]
        off = (in_order - x.float() / scales).abs()
        assert bool((off <= torch.maximum(in_order.abs() * 2**-4, torch.tensor(2.0**-10, device=CUDA)) * 1.07).all())
        wanted = (in_order * scales).double() @ linear.unpack().cuda().double().T
        assert relative_error(fp8_gemm(x, weight, None), wanted) < TOLERANCE[torch.bfloat16]
        exact = x.double() @ linear.unpack().cuda().double().T
        assert 0.01 < relative_error(QuantizedMatmul(weight, None, scaled=True)(x), exact) < 0.06


def test_few_rows_take_no_memory_for_dense_weights() -> None:
    """Products of few rows allocate no memory for dense weights."""
    weight = on_device(IntScheme(4, 128).pack(torch.randn(4096, 4096) * 0.02), CUDA)
    product = QuantizedMatmul(weight, None)
    for rows in (1, 8, 64, DEQUANTIZE_MIN_ROWS - 1):
        x = torch.randn(rows, 4096, device=CUDA, dtype=torch.bfloat16)
        product(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        product(x)
        assert torch.cuda.max_memory_allocated() - before <= 2**24


@every_scheme
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-2), (torch.bfloat16, 4e-2)])
def test_recorded_steps_with_quantised_weights_match_the_reference(
    scheme: Scheme, dtype: torch.dtype, limit: float
) -> None:
    """Prefill, chunks, mixed steps and recorded decodes match the reference on the unpacked weights.

    Activations that are rounded to eight bits may be rounded to the other side.
    """
    limit = 4e-2 if scheme.activation_bits == 8 else limit
    weights = quantised(scheme)
    runner = CudaRunner(WIDE, weights, 8, 64, 4, dtype)
    said: list[str] = []
    runner.record(said.append)
    assert "recorded decode steps" in said[-1]
    reference = TorchRunner(WIDE, as_floats(weights), 8, 64)
    for step in (*STEPS, *STEPS[3:]):
        assert relative_error(runner.run(step).logits.cpu(), reference.run(step).logits) < limit


@pytest.mark.parametrize("scheme", [IntScheme(4, 64, "integer"), Fp8Scheme(), FloatScheme("float16")])
def test_the_cuda_runner_serves_quantised_weights(scheme: Scheme) -> None:
    """The CUDA runner passes its self-test on quantised weights and is chosen."""
    asked = 64 * BLOCK_SIZE * 2 * 2 * WIDE.num_layers * WIDE.num_kv_heads * WIDE.head_dim
    engine = EngineConfig(max_batch=8, kv_memory=asked)
    runner = choose_cuda(WIDE, quantised(scheme), engine, 64, lambda sentence: None)
    assert runner.name == "cuda-bfloat16"
