"""The CUDA runner on a device, with recorded steps, against the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from backend.engine.config import EngineConfig
from backend.engine.model_runner import BLOCK_SIZE
from backend.errors import ModelError
from backend.runners.cuda.choice import choose_cuda
from backend.runners.cuda.runner import CudaRunner
from backend.runners.self_test import max_relative_error
from backend.runners.torch.runner import TorchRunner
from tests.backend.runners.cuda.random_model import CONFIG, STEPS, VARIANTS, random_weights, step_of
from tests.backend.runners.cuda.references import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def recorded(runner: CudaRunner) -> CudaRunner:
    """The runner with its decode steps recorded, which must succeed here."""
    said: list[str] = []
    runner.record(said.append)
    assert "recorded decode steps" in said[-1]
    return runner


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_logits_agree_with_the_reference(variant: str, dtype: torch.dtype, limit: float) -> None:
    """Logits match the reference over prefill, chunks, mixed steps and recorded decode, in every dtype."""
    config = VARIANTS[variant]
    weights = random_weights(config)
    runner = recorded(CudaRunner(config, weights, 8, 64, 4, dtype))
    reference = TorchRunner(config, weights, 8, 64)
    for step in STEPS:
        assert relative_error(runner.run(step).logits.cpu(), reference.run(step).logits) < limit


def test_a_recorded_step_matches_the_step_that_it_replaces() -> None:
    """A recorded step gives the logits of the same step without a recording, and repeats them bit for bit."""
    weights = random_weights(CONFIG)
    runner = recorded(CudaRunner(CONFIG, weights, 64, 256, 24, torch.bfloat16))
    prompts = [(list(range(4 * row, 4 * row + 4)), 0, 5 + 2 * row) for row in range(11)]
    runner.run(step_of(prompts))
    decode = step_of([(blocks, count, 1) for blocks, _, count in prompts])
    replayed = runner.run(decode).logits.clone()
    plain = runner.run(dataclasses.replace(decode, hidden_rows=decode.logits_rows)).logits
    assert relative_error(replayed.cpu(), plain.cpu()) < 1e-2
    again = runner.run(decode).logits
    assert torch.equal(again, replayed)


def test_recorded_batches_of_changing_size_match_the_reference() -> None:
    """Recorded batches of changing size match the reference's logits over a long run."""
    weights = random_weights(CONFIG)
    runner = recorded(CudaRunner(CONFIG, weights, 64, 256, 16, torch.float32))
    reference = TorchRunner(CONFIG, weights, 64, 256)
    lengths = {row: 3 + row for row in range(13)}
    first = step_of([([4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3], 0, count) for row, count in lengths.items()])
    assert relative_error(runner.run(first).logits.cpu(), reference.run(first).logits) < 1e-4
    random = np.random.default_rng(0)
    for _ in range(30):
        chosen = sorted(random.choice(13, size=random.integers(1, 14), replace=False).tolist())
        step = step_of([([4 * row + block for block in range(4)], lengths[row], 1) for row in chosen])
        assert relative_error(runner.run(step).logits.cpu(), reference.run(step).logits) < 1e-4
        for row in chosen:
            lengths[row] += 1


def test_the_self_test_notices_a_wrong_rotary_base() -> None:
    """The self-test is far above its limit with a wrong rotary base, and passes for the right kernels."""
    weights = random_weights(CONFIG)

    def wrong(*arguments: object) -> CudaRunner:
        config, some, num_blocks, context = arguments
        other = dataclasses.replace(CONFIG, num_layers=config.num_layers, rope_theta=50.0)  # type: ignore[attr-defined]
        return CudaRunner(other, some, num_blocks, context, 4, torch.bfloat16)  # type: ignore[arg-type]

    assert max_relative_error(CONFIG, weights, wrong) > 0.1
    said: list[str] = []
    asked = 64 * BLOCK_SIZE * 2 * 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
    runner = choose_cuda(CONFIG, weights, EngineConfig(max_batch=8, kv_memory=asked), 128, said.append)
    assert isinstance(runner, CudaRunner)
    assert runner.num_blocks == 64
    assert runner.max_batch == 8
    assert "recorded decode steps for 4 batch sizes" in said[-1]
    with pytest.raises(ModelError, match=r"--kv-memory: .* do not fit the device"):
        choose_cuda(CONFIG, weights, EngineConfig(kv_memory=2**50), 128, said.append)


def test_a_step_does_not_wait_for_the_device() -> None:
    """A replayed step returns before the device has computed it."""
    runner = recorded(CudaRunner(CONFIG, random_weights(CONFIG), 8, 64, 4, torch.bfloat16))
    for step in STEPS:
        runner.run(step)
    torch.cuda.synchronize()
    cuda: Any = torch.cuda  # its events have no types
    cuda._sleep(200_000_000)  # cycles: about a tenth of a second
    runner.run(STEPS[-1])
    finished = cuda.Event()
    finished.record()
    assert not finished.query()
    finished.synchronize()
