"""The KV blocks of ranks are those of one device: stored by one division of a model, they are read by another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backend.engine.kv_blocks import KvBlocks
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner
from backend.models.config import KvDtype
from tests.backend.random_models import KINDS, Paged, random_tokens, save, step_of
from tests.backend.runners.parallel.ranks import many_ranks, one_rank
from tests.backend.runners.test_kv_blocks import bytes_of, carried

TOKENS = random_tokens(4 * BLOCK_SIZE + 5)
KINDS_OF_KV: tuple[KvDtype, ...] = ("auto", "int8", "fp8")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with two KV heads."""
    saved = tmp_path_factory.mktemp("llama")
    save(KINDS["llama"], saved)
    return saved


def blocks_of(runner: ModelRunner) -> KvBlocks:
    """Its blocks, which it must have."""
    blocks = runner.kv_blocks
    assert blocks is not None
    assert blocks is runner.kv_blocks
    assert blocks.layout.nbytes == BLOCK_SIZE * runner.kv_bytes_per_token
    return blocks


def assert_continues(writer: ModelRunner, reader: ModelRunner, most: float) -> None:
    """What one runner has computed, copied into the memory of another, gives the same logits for the next tokens."""
    whole = Paged(TOKENS, [3, 5, 7, 9, 11])
    writer.run(step_of([(whole, 4 * BLOCK_SIZE)]))
    untouched = bytes_of(blocks_of(reader), 4)
    carried(blocks_of(writer), blocks_of(reader), [(3, 10), (5, 8), (7, 6), (9, 0)])
    copied = Paged(TOKENS, [10, 8, 6, 0, 1], computed=4 * BLOCK_SIZE)
    expected = writer.run(step_of([(whole, 5)])).logits
    assert float((reader.run(step_of([(copied, 5)])).logits - expected).abs().max()) < most
    assert np.array_equal(bytes_of(blocks_of(reader), 4), untouched)


@pytest.mark.parametrize("kv_dtype", KINDS_OF_KV)
def test_blocks_of_one_device_are_read_by_ranks_and_the_reverse(kv_dtype: KvDtype, directory: Path) -> None:
    """Two stages of two ranks continue on blocks of one device, and one device on theirs; layouts are the same."""
    one = one_rank(directory, kv_dtype=kv_dtype)
    with many_ranks(directory, 2, 2, kv_dtype=kv_dtype) as many:
        assert blocks_of(many).layout == blocks_of(one).layout
        assert (many.name, many.kernels, many.kv_precision) == (one.name, one.kernels, one.kv_precision)
        # What is rounded to eight bits may be rounded the other way by a difference in the last bit of a float.
        most = 1e-4 if kv_dtype == "auto" else 0.05
        assert_continues(one, many, most)
        assert_continues(many, one, most)


def test_blocks_of_two_ranks_are_read_by_four_that_share_kv_heads(directory: Path) -> None:
    """Where ranks have the same KV head, each of them finds it in a restored block."""
    with many_ranks(directory, 2) as two, many_ranks(directory, 4) as four:
        assert_continues(two, four, 1e-4)
        assert_continues(four, two, 1e-4)
