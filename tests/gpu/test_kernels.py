"""The kernels compiled for the device, at sizes that the interpreter is too slow for."""

from __future__ import annotations

import pytest
import torch

from backend.engine.model_runner import BLOCK_SIZE
from backend.kernels.add_rms_norm import add_rms_norm
from backend.kernels.paged_decode import AttentionShape, paged_decode
from backend.kernels.paged_prefill import paged_prefill, prefill_tile_rows, prefill_tiles
from backend.kernels.rotary_write import rotary_write
from backend.kernels.sampling import sample_tokens
from backend.kernels.silu_mul import silu_mul
from tests.backend.runners.cuda.references import (
    TOLERANCE,
    attention_reference,
    kept_tokens,
    paged_case,
    relative_error,
    rms_norm_reference,
    rotation_reference,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [
    AttentionShape(32, 8, 128, 128**-0.5),
    AttentionShape(9, 3, 64, 0.125),
    AttentionShape(6, 1, 96, 0.1, window=100),
    AttentionShape(8, 8, 80, 0.1, softcap=20.0),
    AttentionShape(8, 4, 256, 0.0625, window=300, softcap=50.0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("splits", [1, 2, 32])
def test_decode_attention_at_device_sizes(shape: AttentionShape, dtype: torch.dtype, splits: int) -> None:
    """Decode attention matches the formula for contexts from one token to thousands in one launch."""
    case = paged_case(shape, [(length - 1, 1) for length in (1, 16, 17, 333, 4096, 5000)], dtype, 1, "cuda")
    rows = torch.arange(6, dtype=torch.int32, device="cuda")
    got = paged_decode(case.query, case.keys, case.values, case.where, rows, shape, splits)
    assert relative_error(got, attention_reference(case)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_attention_at_device_sizes(shape: AttentionShape, dtype: torch.dtype) -> None:
    """Prefill attention matches the formula for prompts and chunks, and leaves rows of one token alone."""
    case = paged_case(shape, [(0, 700), (1000, 129), (40, 1), (15, 2), (0, 17)], dtype, 2, "cuda")
    tiles = prefill_tiles(case.query_starts, case.positions, prefill_tile_rows(shape, dtype))
    width = shape.num_heads * shape.head_dim
    output = torch.full((case.query.shape[0], width), 7.0, dtype=dtype, device="cuda")
    paged_prefill(case.query, case.keys, case.values, case.where, torch.from_numpy(tiles).cuda(), shape, output)
    assert (output[829] == 7.0).all()
    others = torch.arange(len(output), device="cuda") != 829
    assert relative_error(output[others], attention_reference(case)[others]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 4096, 16384])
def test_norm_and_gate(width: int, dtype: torch.dtype) -> None:
    """RMS norm and gate match their formulas at the row widths of small and large models."""
    residual, delta = (torch.randn(33, width, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.randn(width, device="cuda")
    summed = residual + delta
    got = add_rms_norm(residual, delta, weight, 1e-5)
    assert torch.equal(residual, summed)
    assert relative_error(got, rms_norm_reference(summed, weight, 1e-5)) < TOLERANCE[dtype]
    gate_up = torch.randn(33, 2 * width, device="cuda", dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert relative_error(silu_mul(gate_up), gate * gate.sigmoid() * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_write(dim: int, normed: bool, dtype: torch.dtype) -> None:
    """`rotary_write` rotates queries in place and writes keys and values to their slots."""
    heads, kv_heads, rows = 12, 3, 200
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device="cuda", dtype=dtype)
    rope = torch.randn(500, dim, device="cuda")
    positions = torch.randint(0, 500, (rows,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(20 * BLOCK_SIZE, device="cuda", dtype=torch.int32)[:rows]
    norms = (torch.randn(dim, device="cuda", dtype=dtype), torch.randn(dim, device="cuda", dtype=dtype))
    keys, values = (torch.full((20, kv_heads, BLOCK_SIZE, dim), 7.0, device="cuda", dtype=dtype) for _ in range(2))
    query, key, value = qkv.clone().view(rows, -1, dim).split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    rotary_write(qkv, rope, positions, slots, norms if normed else None, 1e-6, keys, values)
    wanted_query = rms_norm_reference(query, norms[0], 1e-6) if normed else query
    wanted_key = rms_norm_reference(key, norms[1], 1e-6) if normed else key
    got_query = qkv.view(rows, -1, dim)[:, :heads]
    blocks, offsets = slots.long() // BLOCK_SIZE, slots.long() % BLOCK_SIZE
    assert relative_error(got_query, rotation_reference(wanted_query, rope, positions)) < TOLERANCE[dtype]
    assert relative_error(keys[blocks, :, offsets], rotation_reference(wanted_key, rope, positions)) < TOLERANCE[dtype]
    assert torch.equal(values[blocks, :, offsets], value)
    assert int((values == 7.0).all(-1).sum()) == (20 * BLOCK_SIZE - rows) * kv_heads


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 40, 0.8, 0.02)],
)
def test_sampling_from_a_whole_vocabulary(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """20,000 draws from a whole vocabulary pass the filters and have the right frequencies."""
    draws = 20_000
    row = torch.randn(128_256, generator=torch.Generator().manual_seed(3)) * 4
    logits = row.cuda().expand(draws, -1)
    tokens = sample_tokens(
        logits,
        torch.full((draws,), temperature, device="cuda"),
        torch.full((draws,), top_k, dtype=torch.int32, device="cuda"),
        torch.full((draws,), top_p, device="cuda"),
        torch.full((draws,), min_p, device="cuda"),
        torch.arange(draws, device="cuda"),
        torch.zeros(draws, dtype=torch.int32, device="cuda"),
    )
    # Sums in float32 may end one token later than sums in float64.
    assert kept_tokens(row, temperature, top_k, min(1.0, top_p * 1.0001), min_p)[tokens.cpu()].all()
    kept = kept_tokens(row, temperature, top_k, top_p, min_p)
    expected = (row.double() / temperature).masked_fill(~kept, float("-inf")).softmax(-1) * draws
    drawn = torch.bincount(tokens.cpu(), minlength=len(row)).double()
    common = expected >= 20
    deviations = (drawn - expected)[common] / expected[common].sqrt()
    assert deviations.abs().max() < 5
    nothing = torch.zeros(2, device="cuda")
    no_seeds = torch.zeros(2, dtype=torch.int64, device="cuda")
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    greedy = sample_tokens(logits[:2], nothing, counts, nothing + 1, nothing, no_seeds, counts)
    assert greedy.tolist() == [int(row.argmax())] * 2
