"""Products of few rows against the formula, and in the decoder."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.kernels.skinny_gemm import MAX_ROWS, skinny_gemm
from backend.runners.cuda.runner import CudaRunner
from backend.runners.cuda.skinny_gemm import SkinnyGemmTable
from backend.runners.torch.runner import TorchRunner
from tests.backend.runners.cuda.examples import FEW
from tests.backend.runners.cuda.random_model import CONFIG, STEPS, random_weights
from tests.backend.runners.cuda.references import TOLERANCE, relative_error


@given(
    rows=st.integers(1, MAX_ROWS),
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 700),
    biased=st.booleans(),
    wider=st.sampled_from([0, 5]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@FEW
def test_skinny_products_match_the_formula(
    rows: int, outputs: int, inputs: int, biased: bool, wider: int, dtype: torch.dtype, seed: int
) -> None:
    """Products of any size match the formula, also for rows that are slices of wider ones."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs + wider, generator=random).to(dtype)[:, :inputs]
    weight = torch.randn(outputs, inputs, generator=random).to(dtype)
    bias = torch.randn(outputs, generator=random).to(dtype) if biased else None
    wanted = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert relative_error(skinny_gemm(x, weight, bias), wanted) < TOLERANCE[dtype]


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    """A row is bitwise the same whatever rows are beside it."""
    random = torch.Generator().manual_seed(3)
    x, weight = torch.randn(4, 600, generator=random), torch.randn(20, 600, generator=random)
    together = skinny_gemm(x, weight, None)
    assert torch.equal(skinny_gemm(x[2:3], weight, None), together[2:3])
    assert torch.equal(skinny_gemm(x[1:4], weight, None), together[1:4])


def test_the_decoder_with_skinny_products_matches_the_reference() -> None:
    """The decoder with skinny products matches the reference in decode steps of one row and of three."""
    weights = random_weights(CONFIG)
    runner = CudaRunner(CONFIG, weights, 8, 64, 4, torch.float32, "cpu")
    reference = TorchRunner(CONFIG, weights, 8, 64)
    shapes = {(linear.weight.shape[0], linear.weight.shape[1]) for linear in runner.decoder.linears()}
    runner.decoder.product = SkinnyGemmTable(frozenset((rows, *shape) for shape in shapes for rows in (1, 3)))
    for step in STEPS[3:]:
        got, expected = runner.run(step), reference.run(step)
        assert relative_error(got.logits, expected.logits) < 1e-5
