"""The elementwise kernels against their formulas."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.model_runner import BLOCK_SIZE
from backend.kernels.add_rms_norm import add_rms_norm
from backend.kernels.rotary_write import rotary_write
from backend.kernels.silu_mul import silu_mul
from tests.backend.runners.cuda.examples import FEW
from tests.backend.runners.cuda.references import TOLERANCE, relative_error, rms_norm_reference, rotation_reference

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@given(rows=st.integers(1, 5), width=st.integers(2, 3000), adds=st.booleans(), dtype=DTYPES, seed=st.integers(0, 99))
@FEW
def test_add_rms_norm(rows: int, width: int, adds: bool, dtype: torch.dtype, seed: int) -> None:
    """`add_rms_norm` leaves the rounded sum in the residual and returns its RMS norm."""
    random = torch.Generator().manual_seed(seed)
    residual, delta = (torch.randn(rows, width, generator=random).to(dtype) for _ in range(2))
    weight = torch.randn(width, generator=random).to(dtype)
    summed = residual + delta if adds else residual.clone()
    got = add_rms_norm(residual, delta if adds else None, weight, 1e-5)
    # Not to the bit: the interpreter cuts bfloat16 off where a device rounds.
    assert relative_error(residual, summed) < TOLERANCE[dtype]
    assert relative_error(got, rms_norm_reference(residual, weight, 1e-5)) < TOLERANCE[dtype]


@given(rows=st.integers(1, 4), width=st.integers(1, 2500), dtype=DTYPES, seed=st.integers(0, 99))
@FEW
def test_silu_mul(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    """`silu_mul` takes the gate from the first half of a row and the up projection from the second."""
    gate_up = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert relative_error(silu_mul(gate_up), gate * gate.sigmoid() * up) < TOLERANCE[dtype]


@given(
    heads=st.sampled_from([(1, 1), (3, 1), (8, 2), (6, 6)]),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    rows=st.integers(1, 4),
    normed=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
@FEW
def test_rotary_write(heads: tuple[int, int], dim: int, rows: int, normed: bool, dtype: torch.dtype, seed: int) -> None:
    """`rotary_write` rotates queries in place, and writes rotated keys and plain values to their slots only."""
    query_heads, kv_heads = heads
    random = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, (query_heads + 2 * kv_heads) * dim, generator=random).to(dtype)
    rope = torch.randn(50, dim, generator=random)
    positions = torch.randint(0, 50, (rows,), generator=random, dtype=torch.int32)
    slots = torch.randperm(3 * BLOCK_SIZE, generator=random)[:rows]
    norms = (torch.randn(dim, generator=random).to(dtype), torch.randn(dim, generator=random).to(dtype))
    keys, values = (torch.full((3, kv_heads, BLOCK_SIZE, dim), 7.0, dtype=dtype) for _ in range(2))
    query, key, value = qkv.clone().view(rows, -1, dim).split_with_sizes([query_heads, kv_heads, kv_heads], dim=1)

    rotary_write(qkv, rope, positions, slots, norms if normed else None, 1e-6, keys, values)

    wanted_query = rms_norm_reference(query, norms[0], 1e-6) if normed else query
    wanted_key = rms_norm_reference(key, norms[1], 1e-6) if normed else key
    got_query, raw_key, raw_value = qkv.view(rows, -1, dim).split_with_sizes([query_heads, kv_heads, kv_heads], dim=1)
    assert relative_error(got_query, rotation_reference(wanted_query, rope, positions)) < TOLERANCE[dtype]
    assert torch.equal(raw_key, key)
    assert torch.equal(raw_value, value)
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    assert relative_error(keys[blocks, :, offsets], rotation_reference(wanted_key, rope, positions)) < TOLERANCE[dtype]
    assert torch.equal(values[blocks, :, offsets], value)
    untouched = torch.ones(3, BLOCK_SIZE, dtype=torch.bool)
    untouched[blocks, offsets] = False
    for store in (keys, values):
        assert (store.transpose(1, 2)[untouched] == 7.0).all()
