"""Blocks copied from one runner's KV memory to another's continue as if they had been computed there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from backend.engine.kv_blocks import KvBlocks
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner
from backend.model_loader.weights import ModelWeights
from backend.models.config import ModelConfig
from backend.runners.fused.runner import FusedRunner
from backend.runners.torch.runner import TorchRunner
from prefix_store.frames.segments import gather, scatter
from tests.backend.conftest import built_library
from tests.backend.random_models import Paged, random_tokens, step_of
from tests.backend.runners.test_fused import small

CONTEXT = 256
TOKENS = random_tokens(5 * BLOCK_SIZE + 3)

Make = Callable[[ModelConfig, ModelWeights], FusedRunner | TorchRunner]
RUNNERS: dict[str, Make] = {
    "fused float16": lambda c, w: FusedRunner(built_library(), c, w, 12, CONTEXT, 1),
    "fused, int8 KV": lambda c, w: FusedRunner(built_library(), c, w, 12, CONTEXT, 1, kv_precision="int8"),
    "torch float32": lambda c, w: TorchRunner(c, w, 12, CONTEXT),
    "torch bfloat16": lambda c, w: TorchRunner(c, w, 12, CONTEXT, torch.bfloat16),
    "torch, int8 KV": lambda c, w: TorchRunner(c, w, 12, CONTEXT, kv_dtype="int8"),
    "torch, fp8 KV": lambda c, w: TorchRunner(c, w, 12, CONTEXT, kv_dtype="fp8"),
}


def carried(source: KvBlocks, target: KvBlocks, pairs: list[tuple[int, int]]) -> None:
    """Copies blocks from one memory to the other, as bytes."""
    assert source.layout == target.layout
    data = np.empty(source.layout.nbytes, np.uint8)
    outgoing = source.outgoing([ours for ours, _ in pairs])
    incoming = target.incoming([theirs for _, theirs in pairs])
    assert outgoing is not None
    assert incoming is not None
    for ours, theirs in zip(outgoing.ready(), incoming.segments, strict=True):
        gather(ours, data)
        scatter(data, theirs)
    incoming.arrived(len(pairs))
    incoming.close()
    outgoing.close()


def bytes_of(source: KvBlocks, block: int) -> npt.NDArray[np.uint8]:
    """A copy of a block."""
    outgoing = source.outgoing([block])
    assert outgoing is not None
    data = np.empty(source.layout.nbytes, np.uint8)
    gather(outgoing.ready()[0], data)
    outgoing.close()
    return data


@pytest.mark.parametrize("name", RUNNERS)
def test_logits_on_copied_blocks_are_bitwise_the_same(name: str, config: ModelConfig, weights: ModelWeights) -> None:
    """Logits on blocks copied to other places of another memory are bitwise the same; other blocks stay untouched."""
    config, weights = small(config, weights)
    first, second = (RUNNERS[name](config, weights) for _ in range(2))
    whole = Paged(TOKENS, [3, 5, 7, 9, 11, 1])
    first.run(step_of([(whole, 5 * BLOCK_SIZE)]))
    beside = bytes_of(second.kv_blocks, 4)
    carried(first.kv_blocks, second.kv_blocks, [(3, 10), (5, 8), (7, 6), (9, 0), (11, 2)])
    other = Paged(TOKENS, [10, 8, 6, 0, 2, 1], computed=5 * BLOCK_SIZE)

    assert torch.equal(first.run(step_of([(whole, 3)])).logits, second.run(step_of([(other, 3)])).logits)
    assert np.array_equal(bytes_of(second.kv_blocks, 4), beside)


@pytest.mark.parametrize("name", RUNNERS)
def test_a_layout_has_the_size_that_the_runner_says(name: str, config: ModelConfig, weights: ModelWeights) -> None:
    """The layout of a block has the runner's KV bytes per token, scales included."""
    runner: ModelRunner = RUNNERS[name](*small(config, weights))
    assert runner.kv_blocks is not None
    assert runner.kv_blocks.layout.nbytes == runner.kv_bytes_per_token * BLOCK_SIZE
    assert runner.kv_blocks.most_at_once == runner.num_blocks
    bytes_of(runner.kv_blocks, 0)  # which checks that the segments have so many
