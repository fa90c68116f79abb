"""The fused CPU step serves only if it builds and passes its self-test; otherwise the torch reference serves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from backend.engine.config import EngineConfig
from backend.engine.model_runner import ModelRunner
from backend.model_loader.weights import ModelWeights
from backend.models.config import ModelConfig
from backend.runners import choice as runner_choice
from backend.runners.choice import MAX_RELATIVE_ERROR, choose_runner
from backend.runners.errors import RunnerUnavailable
from backend.runners.fused.build import load_fused_library
from backend.runners.fused.runner import FusedRunner, check_shape
from backend.runners.self_test import max_relative_error
from backend.runners.torch.runner import TorchRunner
from backend.runners.warm_up import single_sequence_step
from tests.backend.conftest import built_library, quiet
from tests.backend.random_models import chunked, random_tokens

KV_MEMORY = 8 * 2**20
TOKENS = random_tokens(90)
ENGINE = EngineConfig(kv_memory=KV_MEMORY, threads=2)


def make_fused(config: ModelConfig, weights: ModelWeights, num_blocks: int, context: int) -> ModelRunner:
    return FusedRunner(built_library(), config, weights, num_blocks, context, threads=2)


def small(config: ModelConfig, weights: ModelWeights) -> tuple[ModelConfig, ModelWeights]:
    """The first two layers of the real model, which are quicker and enough to choose a runner."""
    return (
        dataclasses.replace(config, num_layers=2),
        dataclasses.replace(weights, layers=weights.layers[:2]),
    )


def test_the_self_test_passes_and_notices_faults(config: ModelConfig, weights: ModelWeights) -> None:
    """The self-test's error is far below the limit, and above it with a wrong rotary base or swapped layers."""
    assert max_relative_error(config, weights, make_fused) < MAX_RELATIVE_ERROR / 5

    def wrong_rotation(c: ModelConfig, w: ModelWeights, num_blocks: int, context: int) -> ModelRunner:
        return make_fused(dataclasses.replace(c, rope_theta=1000.0), w, num_blocks, context)

    def swapped_layers(c: ModelConfig, w: ModelWeights, num_blocks: int, context: int) -> ModelRunner:
        return make_fused(c, dataclasses.replace(w, layers=w.layers[::-1]), num_blocks, context)

    assert max_relative_error(config, weights, wrong_rotation) > MAX_RELATIVE_ERROR
    assert max_relative_error(config, weights, swapped_layers) > MAX_RELATIVE_ERROR


def test_threads_do_not_change_a_bit(config: ModelConfig, weights: ModelWeights) -> None:
    """One thread and three give bitwise the same logits."""
    results = []
    for threads in (1, 3):
        runner = FusedRunner(built_library(), *small(config, weights), 8, 128, threads)
        results.append(chunked(runner, TOKENS, 70, 20))
    assert torch.equal(*results)


def test_without_a_compiler_torch_serves(
    config: ModelConfig, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a C++ compiler torch serves, and a message says why."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    said: list[str] = []
    runner = choose_runner(*small(config, weights), ENGINE, 128, said.append)
    assert isinstance(runner, TorchRunner)
    assert "no C++ compiler" in said[-1]
    runner.run(single_sequence_step(TOKENS, 0))


def test_a_failing_compiler_is_reported_and_leaves_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler's first error is the reason given, and no half built library is left."""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such instruction' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RunnerUnavailable, match="no such instruction"):
        load_fused_library(quiet)
    assert not list((tmp_path / "keepgate" / "kernels").iterdir())


def test_a_wrong_result_is_not_served(
    config: ModelConfig, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that fails its self-test is not served."""
    monkeypatch.setattr(runner_choice, "max_relative_error", lambda *_: 0.5)
    said: list[str] = []
    assert isinstance(choose_runner(*small(config, weights), ENGINE, 128, said.append), TorchRunner)
    assert "failed its self-test" in said[-1]


def test_shapes_that_the_kernels_do_not_cover_are_refused(config: ModelConfig) -> None:
    """A shape that the kernels do not cover is refused by name."""
    with pytest.raises(RunnerUnavailable, match="head_dim is 80"):
        check_shape(dataclasses.replace(config, head_dim=80))


def test_kv_memory_bounds_the_blocks(config: ModelConfig, weights: ModelWeights) -> None:
    """The blocks fill the configured KV memory and no byte more, whatever the batch."""
    built_library()
    small_config, small_weights = small(config, weights)
    runner = choose_runner(small_config, small_weights, ENGINE, 8192, quiet)
    assert runner.num_blocks == KV_MEMORY // FusedRunner.block_bytes(small_config)
    few = dataclasses.replace(ENGINE, max_batch=1)
    assert choose_runner(small_config, small_weights, few, 100, quiet).num_blocks == runner.num_blocks
