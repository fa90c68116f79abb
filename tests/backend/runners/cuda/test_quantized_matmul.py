"""Products with quantised weights in Triton's interpreter, against float64 on the unpacked weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from backend.kernels import quantized_matmul
from backend.kernels.dequantize import dequantize
from backend.kernels.fp8_gemm import fp8_gemm, round_rows, supports_fp8_gemm
from backend.kernels.quantized_gemm import quantized_gemm
from backend.kernels.quantized_matmul import DEQUANTIZE_MIN_ROWS, QuantizedMatmul
from backend.kernels.quantized_skinny_gemm import MAX_ROWS, quantized_skinny_gemm
from backend.kernels.quantized_weight import DeviceWeight, concatenate, on_device
from backend.quantized_weights.float_scheme import FloatScheme
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import CannotQuantize, QuantizedLinear, Scheme, reference
from tests.backend.runners.cuda.examples import FEW
from tests.backend.runners.cuda.references import TOLERANCE, relative_error

CPU = torch.device("cpu")
# Groups narrower and wider than a tile, that divide one and that do not; every way to keep zero.
SCHEMES: tuple[Scheme, ...] = (
    IntScheme(8),
    IntScheme(8, activation_bits=8),
    IntScheme(8, 32, "minimum", activation_bits=8),
    IntScheme(8, 16),
    IntScheme(4),
    *(IntScheme(4, group, zero) for group in (32, 64, 128) for zero in ("middle", "integer", "minimum")),
    IntScheme(4, 16, "minimum"),
    IntScheme(4, 96, "integer"),
    IntScheme(4, 512),
    Fp8Scheme("row"),
    Fp8Scheme("tensor"),
    Nf4Scheme(),
    Nf4Scheme(double=False),
    Nf4Scheme(128),
)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=[scheme.name for scheme in SCHEMES])


def least_inputs(scheme: Scheme) -> int:
    """The number that the inputs must be a multiple of."""
    group = scheme.block_size if isinstance(scheme, Nf4Scheme) else getattr(scheme, "group_size", None)
    return group or 2


def packed(scheme: Scheme, outputs: int, inputs: int, seed: int) -> QuantizedLinear:
    """Weights of unlike rows, one of them all zeros, with a mean that is not zero."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random) * torch.rand(outputs, 1, generator=random) + 0.1
    weight[outputs // 2] = 0
    return scheme.pack(weight)


def tolerance(scheme: Scheme, dtype: torch.dtype) -> float:
    """The largest relative error; NF4's levels and scales are half floats."""
    if isinstance(scheme, Nf4Scheme) and dtype == torch.float32:
        return TOLERANCE[torch.float16]
    return TOLERANCE[dtype]


@every_scheme
@pytest.mark.parametrize(("rows", "dtype"), [(MAX_ROWS - 1, torch.float32), (17, torch.bfloat16), (66, torch.float16)])
def test_products_match_float64(scheme: Scheme, rows: int, dtype: torch.dtype) -> None:
    """Products of few rows, some and more than a tile match float64 with sizes that fill no tile."""
    least = least_inputs(scheme)
    linear = packed(scheme, 70, -(-300 // least) * least, rows)
    x = torch.randn(rows, linear.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.linspace(-3, 3, 70).to(dtype)
    got = QuantizedMatmul(on_device(linear, CPU), bias)(x)
    assert got.dtype == dtype
    assert relative_error(got, reference(linear, x) + bias.double()) < tolerance(scheme, dtype)


@given(
    scheme=st.sampled_from(SCHEMES),
    rows=st.integers(1, 70),
    outputs=st.integers(1, 40),
    groups=st.integers(1, 5),
    biased=st.booleans(),
    wider=st.sampled_from([0, 5]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@FEW
def test_products_of_any_size_match_float64(
    scheme: Scheme, rows: int, outputs: int, groups: int, biased: bool, wider: int, dtype: torch.dtype, seed: int
) -> None:
    """Products of any size match float64, also for rows that are slices of wider ones."""
    inputs = groups * max(least_inputs(scheme), 32)
    linear = scheme.pack(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)))
    random = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(rows, inputs + wider, generator=random).to(dtype)[:, :inputs]
    bias = torch.randn(outputs, generator=random).to(dtype) if biased else None
    wanted = reference(linear, x) + (0.0 if bias is None else bias.double())
    got = QuantizedMatmul(on_device(linear, CPU), bias)(x)
    assert relative_error(got, wanted) < tolerance(scheme, dtype)


@every_scheme
def test_dequantized_weights_match_the_host(scheme: Scheme) -> None:
    """Dequantised weights match those of the host up to one rounding, and NF4's up to half floats."""
    least = least_inputs(scheme)
    linear = packed(scheme, 37, -(-300 // least) * least, 5)
    got, expected = dequantize(on_device(linear, CPU), torch.float32), linear.unpack()
    largest = float(expected.abs().max())
    assert float((got - expected).abs().max()) <= largest * (2**-10 if isinstance(scheme, Nf4Scheme) else 2**-21)


@pytest.mark.parametrize("rows", [1, 20, DEQUANTIZE_MIN_ROWS])
def test_products_with_another_column_order_match_float64(rows: int) -> None:
    """Products with permuted columns match float64 for every number of rows."""
    scheme, random = IntScheme(4, 32, "integer"), torch.Generator().manual_seed(rows)
    weight, order = torch.randn(40, 160, generator=random), torch.randperm(160, generator=random)
    straight = scheme.pack(weight[:, order])
    linear = IntLinear.of(scheme, straight.plain_codes(), straight.grid, order.int())
    x = torch.randn(rows, 160, generator=random)
    assert relative_error(QuantizedMatmul(on_device(linear, CPU), None)(x), reference(linear, x)) < 1e-5


@pytest.mark.parametrize("most_bytes", [2**30, 20_000])
def test_many_rows_multiply_dequantized_weights(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows multiply dequantised weights at once, or in parts of the outputs where memory is limited."""
    # The bound on memory is no option; only large matrices exceed it.
    monkeypatch.setattr(quantized_matmul, "_DEQUANTIZED_BYTES", most_bytes)
    linear = packed(IntScheme(4, 32, "minimum"), 50, 160, 3)
    x = torch.randn(DEQUANTIZE_MIN_ROWS, 160, generator=torch.Generator().manual_seed(2))
    bias = torch.linspace(-2, 2, 50)
    got = QuantizedMatmul(on_device(linear, CPU), bias)(x)
    assert relative_error(got, reference(linear, x) + bias.double()) < 1e-5


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types for it
    """Records the size of the largest tensor that is made meanwhile."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_no_dense_copy_of_the_weights_is_made_to_decode(rows: int) -> None:
    """A product of few rows makes no tensor as large as the dense weights."""
    weight = on_device(IntScheme(4, 64).pack(torch.randn(256, 256)), CPU)
    product, dense = QuantizedMatmul(weight, None), 256 * 256 * 2
    with Largest() as largest:  # type: ignore[no-untyped-call] # the same
        product(torch.randn(rows, 256).half())
    assert largest.nbytes <= max(weight.words.nbytes, rows * 256 * 4) < dense


def test_a_dense_copy_of_the_weights_is_noticed() -> None:
    """The check for dense copies notices the one that a product of many rows makes."""
    weight = on_device(IntScheme(4, 64).pack(torch.randn(256, 256)), CPU)
    with Largest() as largest:  # type: ignore[no-untyped-call] # the same
        QuantizedMatmul(weight, None)(torch.randn(DEQUANTIZE_MIN_ROWS, 256).half())
    assert largest.nbytes >= 256 * 256 * 2


def test_a_row_of_few_does_not_depend_on_those_beside_it() -> None:
    """A row of a small batch is bitwise the same in every batch."""
    weight = on_device(packed(IntScheme(4, 64, "integer"), 20, 320, 1), CPU)
    x = torch.randn(4, 320, generator=torch.Generator().manual_seed(3))
    together = quantized_skinny_gemm(x, weight, None)
    assert torch.equal(quantized_skinny_gemm(x[2:3], weight, None), together[2:3])
    assert torch.equal(quantized_skinny_gemm(x[1:4], weight, None), together[1:4])


def test_parts_are_summed_in_their_order() -> None:
    """Partial sums are added in a fixed order, so rows are bitwise the same for the same number of parts."""
    weight = on_device(packed(IntScheme(4, 64), 20, 1280, 1), CPU)
    x = torch.randn(16, 1280, generator=torch.Generator().manual_seed(3))
    together = quantized_gemm(x, weight, None)
    assert torch.equal(quantized_gemm(x[5:14], weight, None), together[5:14])
    assert torch.equal(quantized_gemm(x, weight, None), together)


@pytest.mark.parametrize("scheme", [IntScheme(4, 32, "integer"), IntScheme(8), Nf4Scheme(), Fp8Scheme("tensor")])
def test_concatenated_weights_match_their_parts(scheme: Scheme) -> None:
    """Concatenated weights give the outputs of all parts, each with its own scales."""
    linears = [packed(scheme, outputs, 192, seed) for seed, outputs in enumerate((16, 5, 11))]
    joined = concatenate([on_device(linear, CPU) for linear in linears])
    assert joined is not None
    x = torch.randn(3, 192)
    wanted = torch.cat([reference(linear, x) for linear in linears], dim=1)
    assert relative_error(QuantizedMatmul(joined, None)(x), wanted) < tolerance(scheme, torch.float32)


def test_weights_that_are_kept_unlike_are_not_joined() -> None:
    """Weights with other codes, groups, zeros, widths, activations or input orders are not concatenated."""

    def kept(scheme: Scheme, inputs: int = 192, order: torch.Tensor | None = None) -> DeviceWeight:
        linear = packed(scheme, 8, inputs, 0)
        if order is not None and isinstance(linear, IntLinear):
            linear = IntLinear.of(IntScheme(4, 32), linear.plain_codes(), linear.grid, order)
        return on_device(linear, CPU)

    first, order = kept(IntScheme(4, 32)), torch.randperm(192).int()
    for other in (
        kept(IntScheme(4, 64)),
        kept(IntScheme(4, 32, "integer")),
        kept(IntScheme(4, 32), 96),
        kept(IntScheme(8, 32)),
        kept(IntScheme(4, 32, activation_bits=8)),
        kept(IntScheme(4, 32), order=order),
    ):
        assert concatenate((first, other)) is None
    same = concatenate((kept(IntScheme(4, 32), order=order), kept(IntScheme(4, 32), order=order.clone())))
    assert same is not None
    assert same.outputs == 16


def test_schemes_without_a_kernel_are_refused() -> None:
    """A scheme without a kernel is refused by name with what would be right."""
    with pytest.raises(CannotQuantize, match="int4-g8 weights: groups of 8 inputs, expected multiples of 16"):
        on_device(IntScheme(4, 8).pack(torch.randn(4, 64)), CPU)
    with pytest.raises(CannotQuantize, match="do not compute with float16 weights"):
        on_device(FloatScheme("float16").pack(torch.randn(4, 64)), CPU)


@pytest.mark.parametrize(("outputs", "inputs"), [(256, 1024), (128, 4096)])
def test_device_weights_take_the_bytes_of_host_weights(outputs: int, inputs: int) -> None:
    """A weight whose rows fill tiles takes the same bytes on a device as on the host; NF4's scales take 16 bits."""
    for scheme in (IntScheme(4, 128), IntScheme(8), Fp8Scheme()):
        linear = packed(scheme, outputs, inputs, 0)
        assert on_device(linear, CPU).nbytes == linear.nbytes
    assert on_device(packed(Nf4Scheme(), outputs, inputs, 0), CPU).nbytes == outputs * inputs * (4 + 16 / 64) / 8


@pytest.mark.parametrize("size", [1e-9, 1e6])
def test_scales_beyond_half_floats_stay_as_they_are(size: float) -> None:
    """NF4 scales that are tiny or huge are kept as they are."""
    linear = Nf4Scheme(double=False).pack(torch.randn(8, 128) * size)
    x = torch.randn(2, 128)
    got = QuantizedMatmul(on_device(linear, CPU), None)(x)
    assert relative_error(got, reference(linear, x)) < TOLERANCE[torch.float16]


def test_rows_are_rounded_to_eight_bits() -> None:
    """Each row is rounded to FP8 with its own scale, in the byte order of a weight.

    The interpreter loses the carry where rounding reaches a power of two, so that is left to tests/gpu.
    """
    weight = on_device(packed(Fp8Scheme(), 16, 200, 0), CPU)
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1], [50], [0], [1e4]])
    rounded, scales = round_rows(x, weight)
    assert torch.allclose(scales[[0, 1, 2, 4]], x[[0, 1, 2, 4]].abs().amax(1, keepdim=True) / 448)
    planes = torch.nn.functional.pad(x / scales, (0, 56)).view(5, 2, 4, 32)
    wanted = planes.transpose(2, 3).reshape(5, 256)
    fraction = torch.frexp(wanted.abs()).mantissa * 2
    compared = (wanted.abs() >= 2**-6) & (fraction < 1.9375)
    assert bool((compared[[0, 1, 2, 4]].sum(1) > 150).all())
    off = (rounded.float() - wanted).abs()
    assert bool((off[compared] <= wanted.abs()[compared] / 8).all())
    assert bool((rounded[3].float() == 0).all())


def test_fp8_products_lose_only_the_rounding_of_rows() -> None:
    """A product of FP8 rows and weights differs from float64 by the rounding of the rows only."""
    linear = packed(Fp8Scheme(), 32, 200, 0)
    x = torch.randn(64, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.linspace(-1, 1, 32).bfloat16()
    got = fp8_gemm(x, on_device(linear, CPU), bias)
    assert 0.005 < relative_error(got, reference(linear, x) + bias.double()) < 0.1
    assert not supports_fp8_gemm(CPU)
