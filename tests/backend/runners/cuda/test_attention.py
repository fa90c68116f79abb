"""Paged attention against a gather and the formula."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.model_runner import BLOCK_SIZE, SequenceRows, pack
from backend.kernels.paged_decode import AttentionShape, PagedRows, paged_decode
from backend.kernels.paged_prefill import PagedTree, paged_prefill, prefill_tile_rows, prefill_tiles
from tests.backend.runners.cuda.examples import FEW
from tests.backend.runners.cuda.references import TOLERANCE, PagedCase, attention_reference, paged_case, relative_error

# The interpreter multiplies the bit patterns of bfloat16 matrices; tests/gpu has that dtype too.
DTYPES = [torch.float32, torch.float16]


@st.composite
def shapes(draw: st.DrawFn, head_dims: tuple[int, ...]) -> AttentionShape:
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 4), (1, 6), (1, 8)]))
    dim = draw(st.sampled_from(head_dims))
    window = draw(st.sampled_from([0, 0, 1, 5, 16, 40]))
    softcap = draw(st.sampled_from([0.0, 0.0, 5.0]))
    return AttentionShape(kv_heads * group, kv_heads, dim, dim**-0.5, window, softcap)


def decoded(case: PagedCase, splits: int) -> torch.Tensor:
    rows = torch.arange(case.query.shape[0], dtype=torch.int32, device=case.query.device)
    return paged_decode(case.query, case.keys, case.values, case.where, rows, case.shape, splits)


def prefilled(case: PagedCase) -> torch.Tensor:
    tiles = prefill_tiles(case.query_starts, case.positions, prefill_tile_rows(case.shape, case.query.dtype))
    width = case.shape.num_heads * case.shape.head_dim
    output = torch.full((case.query.shape[0], width), float("nan"), dtype=case.query.dtype, device=case.query.device)
    tiles_there = torch.from_numpy(tiles).to(case.query.device)
    paged_prefill(case.query, case.keys, case.values, case.where, tiles_there, case.shape, output)
    return output


@given(
    shape=shapes((64, 80, 96, 128)),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=2),
    splits=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@FEW
def test_decode_attention_matches_the_formula(
    shape: AttentionShape, lengths: list[int], splits: int, dtype: torch.dtype, seed: int
) -> None:
    """Decode attention matches the formula for any lengths, groups, windows, soft caps, splits and dtypes."""
    case = paged_case(shape, [(length - 1, 1) for length in lengths], dtype, seed)
    assert relative_error(decoded(case, splits), attention_reference(case)) < TOLERANCE[dtype]


@given(
    shape=shapes((64, 80, 96, 128)),
    chunks=st.lists(st.tuples(st.integers(0, 90), st.integers(2, 60)), min_size=1, max_size=2),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@FEW
def test_prefill_attention_matches_the_formula(
    shape: AttentionShape, chunks: list[tuple[int, int]], dtype: torch.dtype, seed: int
) -> None:
    """Prefill attention matches the formula for chunks of several sequences with their own starts."""
    case = paged_case(shape, chunks, dtype, seed)
    assert relative_error(prefilled(case), attention_reference(case)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_256_match_the_formula(dtype: torch.dtype) -> None:
    """Decode and prefill match the formula with head_dim 256, a window and a soft cap."""
    shape = AttentionShape(4, 2, 256, 256**-0.5, window=64, softcap=50.0)
    single = paged_case(shape, [(150, 1), (3, 1)], dtype, 1)
    assert relative_error(decoded(single, 4), attention_reference(single)) < TOLERANCE[dtype]
    chunked = paged_case(shape, [(60, 45), (0, 20)], dtype, 2)
    assert relative_error(prefilled(chunked), attention_reference(chunked)) < TOLERANCE[dtype]


def test_rows_of_one_token_are_left_to_the_other_kernel() -> None:
    """In a mixed step the prefill and the decode kernel together write every row once."""
    shape = AttentionShape(4, 2, 64, 0.125)
    case = paged_case(shape, [(9, 1), (4, 30), (70, 1)], torch.float32, 3)
    output = prefilled(case)
    single = torch.tensor([0, 31], dtype=torch.int32)
    assert output[single.long()].isnan().all()
    output[single.long()] = paged_decode(case.query, case.keys, case.values, case.where, single, shape, 2)
    assert relative_error(output, attention_reference(case)) < TOLERANCE[torch.float32]


def test_a_row_does_not_depend_on_its_batch() -> None:
    """A decode row is bitwise the same alone and in a batch with the same number of splits."""
    shape = AttentionShape(8, 2, 64, 0.125)
    case = paged_case(shape, [(100, 1), (17, 1), (250, 1)], torch.float32, 4)
    alone = paged_decode(case.query, case.keys, case.values, case.where, torch.tensor([1], dtype=torch.int32), shape, 2)
    assert torch.equal(alone[0], decoded(case, 2)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prefill_reads_no_block_before_the_window(dtype: torch.dtype) -> None:
    """Prefill reads no block before the window: NaN in the block of freed table entries changes no bit."""
    shape = AttentionShape(4, 2, 64, 0.125, window=40)
    keys, values = (torch.randn(9, 2, 16, 64, dtype=dtype) for _ in range(2))
    # Positions 95 to 100 see 56 and later, which begins in the fourth block.
    tables = torch.tensor([[0, 0, 0, 4, 5, 6, 7]], dtype=torch.int32)
    positions, starts = np.arange(95, 101, dtype=np.int32), np.array([0, 6], dtype=np.int32)
    where = PagedRows(tables, torch.zeros(6, dtype=torch.int32), torch.from_numpy(positions))
    query = torch.randn(6, 4 * 64, dtype=dtype)
    tiles = torch.from_numpy(prefill_tiles(starts, positions, prefill_tile_rows(shape, dtype)))

    def prefill() -> torch.Tensor:
        output = torch.empty(6, 256, dtype=dtype)
        paged_prefill(query, keys, values, where, tiles, shape, output)
        return output

    before = prefill()
    keys[0], values[0] = float("nan"), float("nan")

    assert torch.equal(before, prefill())


@given(
    shape=shapes((64, 80)).filter(lambda shape: not 0 < shape.window < 16),
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=2),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@FEW
def test_rows_of_a_tree_see_their_own_branch(
    shape: AttentionShape, chunks: list[tuple[int, int]], dtype: torch.dtype, seed: int
) -> None:
    """Each row of a draft that branches attends as if its branch alone followed the sequence, whatever lies between."""
    numbers = random.Random(seed)  # noqa: S311
    trees = [tuple(numbers.randint(-1, node - 1) for node in range(numbers.randint(1, 14))) for _ in chunks]
    case = paged_case(
        shape, [(start, count + len(tree)) for (start, count), tree in zip(chunks, trees, strict=True)], dtype, seed
    )
    step = pack(
        [
            SequenceRows([0] * (count + len(tree)), start, table.tolist(), parents=tree)
            for (start, count), tree, table in zip(chunks, trees, case.where.block_tables, strict=True)
        ],
        [],
    )
    assert step.tree is not None
    where = replace(case.where, positions=torch.from_numpy(step.positions))
    tree = PagedTree(*map(torch.from_numpy, (step.tree.places, step.tree.seen, step.tree.masks)))
    tiles = torch.from_numpy(prefill_tiles(step.query_starts, step.positions, prefill_tile_rows(shape, dtype)))
    output = torch.empty(len(step.positions), shape.num_heads * shape.head_dim, dtype=dtype)
    paged_prefill(case.query, case.keys, case.values, where, tiles, shape, output, tree)
    tables = case.where.block_tables[torch.from_numpy(step.query_starts.searchsorted(range(len(output)), "right") - 1)]
    for row, (table, position) in enumerate(zip(tables, step.positions.tolist(), strict=True)):
        places = [*range(step.tree.seen[row])]
        places += [step.tree.seen[row] + bit for bit in range(63) if step.tree.masks[row] >> bit & 1]
        assert len(places) == position + 1
        # The same tokens, in a sequence that has nothing else.
        blocks, count = table[torch.tensor(places) // BLOCK_SIZE].long(), -(-len(places) // BLOCK_SIZE)
        memory = torch.zeros(2, count * BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, dtype=dtype)
        for part, store in enumerate((case.keys, case.values)):
            memory[part, : len(places)] = store[blocks, :, torch.tensor(places) % BLOCK_SIZE]
        keys, values = memory.view(2, count, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim).transpose(2, 3)
        alone = PagedCase(
            shape,
            case.query[row : row + 1],
            keys,
            values,
            PagedRows(
                torch.arange(count, dtype=torch.int32)[None],
                torch.zeros(1, dtype=torch.int32),
                torch.tensor([position], dtype=torch.int32),
            ),
            np.array([0, 1], dtype=np.int32),
        )
        assert relative_error(output[row : row + 1], attention_reference(alone)) < TOLERANCE[dtype]
