"""Every scheme that there is, and weights to try them with."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from backend.quantized_weights.float_scheme import FloatScheme
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntScheme, Zero
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import Scheme

ZEROS: tuple[Zero, ...] = ("middle", "integer", "minimum")
SCHEMES: tuple[Scheme, ...] = (
    FloatScheme("bfloat16"),
    FloatScheme("float16"),
    IntScheme(8),
    IntScheme(8, activation_bits=8),
    IntScheme(8, 32, "minimum", activation_bits=8),
    *(IntScheme(4, group, zero) for group in (32, 64, 128) for zero in ZEROS),
    Fp8Scheme("row"),
    Fp8Scheme("tensor"),
    Nf4Scheme(),
    Nf4Scheme(double=False),
    Nf4Scheme(128),
)
IDS = [scheme.name for scheme in SCHEMES]

_MAGNITUDES = st.sampled_from([0.0, 1e-30, 1e-7, 1e-3, 0.02, 1.0, 300.0])


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    """float32 [out, in]: rows of unlike magnitudes, some with outliers, zeros, or all of one sign."""
    rows, columns = draw(st.integers(1, 5)), 128 * draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.tensor([draw(_MAGNITUDES) for _ in range(rows)]).unsqueeze(1)
    kind = draw(st.sampled_from(["plain", "outlier", "one sign", "holes", "constant"]))
    if kind == "outlier":
        weight[0, draw(st.integers(0, columns - 1))] *= 50
    elif kind == "one sign":
        weight = weight.abs() * draw(st.sampled_from([1, -1]))
    elif kind == "holes":
        weight[:, :64] = 0
    elif kind == "constant":
        weight[:] = weight[:, :1]
    return weight
