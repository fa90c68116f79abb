"""Products with weights that are floats, in the number format that the processor multiplies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.runners.test_fused_formats import assert_product, normed, products, random_rows, rounded_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@settings(max_examples=12, deadline=None)
@given(
    count=st.integers(1, 20),
    outputs=st.integers(1, 80),
    inputs=st.sampled_from([128, 384]),
    seed=st.integers(0, 2**31),
)
def test_products_with_floats_match_float64(
    dtype: torch.dtype, count: int, outputs: int, inputs: int, seed: int
) -> None:
    """Products with any number of rows and outputs match float64 on the rows that the processor multiplies."""
    rows, weight = random_rows(count, inputs, seed), random_rows(outputs, inputs, seed + 1).to(dtype)
    assert_product(products(weight, rows), rounded_rows(normed(rows), weight), weight)
