"""Every scheme keeps its error bound, its size, and the products of its weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.quantized_weights.int_scheme import IntScheme, pack_nibbles, unpack_nibbles
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import CannotQuantize, Scheme, reference
from tests.backend.quantization.schemes import IDS, SCHEMES, weights

every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)


@every_scheme
@given(weight=weights())
def test_no_weight_exceeds_the_error_bound(scheme: Scheme, weight: torch.Tensor) -> None:
    """No packed weight exceeds the scheme's error bound, and its shape and bits are what the scheme says."""
    packed = scheme.pack(weight)
    off = (packed.unpack() - weight).abs()
    assert bool((off <= scheme.error_bound(weight)).all()), (off - scheme.error_bound(weight)).max()
    assert packed.shape == tuple(weight.shape)
    assert packed.nbytes * 8 == pytest.approx(scheme.bits_per_weight(*weight.shape) * weight.numel())


@every_scheme
def test_the_error_bound_is_tight(scheme: Scheme) -> None:
    """The error bound is less than three times the actual error."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    off = (scheme.pack(weight).unpack() - weight).abs()
    assert float((scheme.error_bound(weight) / off.amax(dim=1, keepdim=True)).min()) < 3


@every_scheme
@given(weight=weights())
def test_packing_twice_loses_little_more(scheme: Scheme, weight: torch.Tensor) -> None:
    """Packing an already rounded weight loses less than the bound."""
    once = scheme.pack(weight).unpack()
    twice = scheme.pack(once).unpack()
    assert bool(((twice - once).abs() <= scheme.error_bound(once)).all())


@every_scheme
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_matches_float64(scheme: Scheme, rows: int, dtype: torch.dtype) -> None:
    """A product matches float64 on the unpacked weight and has the dtype of the activations."""
    generator = torch.Generator().manual_seed(rows)
    packed = scheme.pack(torch.randn(48, 256, generator=generator) * 0.05)
    x = torch.randn(rows, 256, generator=generator).to(dtype)
    got, expected = packed.matmul(x), reference(packed, x)
    assert got.dtype == dtype
    assert float((got.double() - expected).norm() / expected.norm()) < (2e-5 if dtype == torch.float32 else 8e-3)


@every_scheme
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_nan_or_infinite_weight_is_refused(scheme: Scheme, wrong: float) -> None:
    """A NaN or infinite weight is refused."""
    weight = torch.ones(2, 128)
    weight[1, 77] = wrong
    with pytest.raises(CannotQuantize, match="not a finite number"):
        scheme.pack(weight)


@pytest.mark.parametrize(
    ("scheme", "columns", "message"),
    [
        (IntScheme(4, 128), 576, "int4-g128 needs inputs in multiples of 128, and these are 576"),
        (Nf4Scheme(), 100, "nf4 needs inputs in multiples of 64, and these are 100"),
        (IntScheme(4), 7, "int4 needs an even number of inputs, and these are 7"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(scheme: Scheme, columns: int, message: str) -> None:
    """A number of inputs that does not fit the scheme is refused with the multiple that it needs."""
    with pytest.raises(CannotQuantize, match=message):
        scheme.pack(torch.ones(2, columns))


def test_a_weight_beyond_half_float_scales_is_refused() -> None:
    """A weight beyond the range of half float scales is refused."""
    with pytest.raises(CannotQuantize, match="beyond the range"):
        IntScheme(4, 32).pack(torch.full((1, 32), 1e7))


@every_scheme
@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-30, 1e30, 3.4e38])
def test_finite_weights_stay_finite_or_are_refused(scheme: Scheme, size: float) -> None:
    """Finite weights of any magnitude stay finite or are refused, and tiny ones become zero."""
    weight = torch.zeros(2, 128)
    weight[0, 3], weight[1, 5], weight[1, 6] = size, size, -size
    try:
        packed = scheme.pack(weight)
    except CannotQuantize as refusal:
        assert size > 1
        assert "beyond the range" in str(refusal)  # noqa: PT017 - either is right
    else:
        assert bool(torch.isfinite(packed.unpack()).all())


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda codes: len(codes) % 2 == 0))
def test_packed_nibbles_are_restored(codes: list[int]) -> None:
    """Four-bit codes are restored from bytes, the first code of each in the low half."""
    packed = pack_nibbles(torch.tensor(codes, dtype=torch.uint8))
    assert unpack_nibbles(packed).tolist() == codes
    assert packed[0] == codes[0] + 16 * codes[1]


@given(weight=weights(), seed=st.integers(0, 100))
def test_columns_may_be_kept_in_another_order(weight: torch.Tensor, seed: int) -> None:
    """A weight packed in another column order unpacks and multiplies in the order of the inputs."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    scheme = IntScheme(4, 32)
    straight = scheme.pack(weight[:, order])
    shuffled = type(straight).of(scheme, straight.plain_codes(), straight.grid, order.int())
    assert torch.equal(shuffled.unpack()[:, order], straight.unpack())
    x = torch.randn(2, weight.shape[1])
    largest = float(weight.abs().max()) * weight.shape[1]
    torch.testing.assert_close(shuffled.matmul(x), straight.matmul(x[:, order]), rtol=1e-4, atol=1e-5 * largest)
