"""Stored keys and values come back as they went in, or within the bound that their format promises."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.config import ComputeDtype, EngineConfig
from backend.engine.engine import Engine
from backend.engine.model_runner import BLOCK_SIZE
from backend.model_loader.weights import ModelWeights, load_weights, read_config
from backend.models import rope
from backend.models.config import KvDtype, ModelConfig, Rope
from backend.models.rope import rotations
from backend.runners.choice import choose_runner
from backend.runners.torch import runner as torch_runner
from backend.runners.torch.kv_memory import KvMemory
from backend.runners.torch.runner import TorchRunner
from tests.backend.conftest import quiet
from tests.backend.models.test_config import read
from tests.backend.random_models import KINDS, Paged, random_tokens, relative_error, save, step_of
from tests.backend.tiny_model import EngineClient

CONFIG = read(num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def stored(vectors: torch.Tensor, kv_dtype: KvDtype) -> torch.Tensor:
    """What a memory gives back for vectors [T, 2, 8] that it was given as keys of layer 1."""
    memory = KvMemory(CONFIG, 2, torch.float32, kv_dtype)
    slots = torch.randperm(2 * BLOCK_SIZE)[: len(vectors)]
    memory.write(1, slots, vectors, -vectors)
    keys, values = memory.read(1, slots[None])
    assert torch.equal(keys.nan_to_num(), -values.nan_to_num())
    return keys[0]


finite = st.floats(-1e4, 1e4, width=32)


@settings(deadline=None, max_examples=60)
@given(st.lists(finite, min_size=16, max_size=16), st.sampled_from(["auto", "int8", "fp8"]))
def test_every_element_is_within_its_bound(numbers: list[float], kv_dtype: KvDtype) -> None:
    """auto: exact. int8: half a step of the vector's largest. fp8: 1/16 of itself, or half the smallest step."""
    vectors = torch.tensor(numbers).view(1, 2, 8)
    error = (stored(vectors, kv_dtype) - vectors).abs()
    largest = vectors.abs().amax(-1, keepdim=True)
    bound = {
        "auto": torch.zeros_like(vectors),
        "int8": (largest / 254).expand_as(vectors),
        "fp8": torch.maximum(vectors.abs() / 16, largest / 448 * 2**-10),
    }[kv_dtype]
    assert bool((error <= bound * 1.001 + 1e-30).all())


@pytest.mark.parametrize(("kv_dtype", "element", "scale"), [("auto", 2, 0), ("int8", 1, 4), ("fp8", 1, 4)])
def test_block_bytes_are_those_allocated(kv_dtype: KvDtype, element: int, scale: int) -> None:
    """Scales count too."""
    memory = KvMemory(CONFIG, 3, torch.bfloat16, kv_dtype)
    held = [tensor for tensor in vars(memory).values() if isinstance(tensor, torch.Tensor)]
    expected = 2 * CONFIG.num_layers * BLOCK_SIZE * 2 * (8 * element + scale)
    assert KvMemory.block_bytes(CONFIG, torch.bfloat16, kv_dtype) == expected
    assert sum(tensor.nbytes for tensor in held) == 3 * expected


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_no_number_stays_with_its_token(kv_dtype: KvDtype, broken: float) -> None:
    """It never comes back as a number, and its neighbours keep their values."""
    vectors = torch.ones(3, 2, 8)
    vectors[1, 0, 3] = broken
    got = stored(vectors, kv_dtype)
    assert not bool(got[1, 0, 3].isfinite())
    assert torch.allclose(got[[0, 2]], vectors[[0, 2]])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, ModelWeights]:
    directory: Path = tmp_path_factory.mktemp("llama")
    save(KINDS["llama-3.1"], directory)
    config = read_config(directory)
    return config, load_weights(directory, config)


@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.02), ("fp8", 0.1)])
def test_quantised_memory_changes_logits_little(
    small: tuple[ModelConfig, ModelWeights], kv_dtype: KvDtype, most: float
) -> None:
    """Over a prefill and decodes; a memory that changed nothing at all would not be quantised."""
    outputs = []
    kinds: tuple[KvDtype, ...] = ("auto", kv_dtype)
    for each in kinds:
        runner = TorchRunner(*small, 8, 128, kv_dtype=each)
        sequence = Paged(random_tokens(60), [3, 1, 7, 0])
        steps = [step_of([(sequence, count)]) for count in (50, 1, 1, 8)]
        outputs.append(torch.cat([runner.run(step).logits for step in steps]))
    exact, rounded = outputs
    assert 1e-5 < relative_error(rounded, exact) < most


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_rotations_are_of_as_many_positions_as_there_is_memory_for(
    small: tuple[ModelConfig, ModelWeights], dtype: ComputeDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of four million positions costs no table of gigabytes where some thousand fit."""
    positions: list[int] = []

    def counted(which: Rope, head_dim: int, count: int) -> torch.Tensor:
        positions.append(count)
        return rotations(which, head_dim, count)

    monkeypatch.setattr(rope, "rotations", counted)
    monkeypatch.setattr(torch_runner, "rotations", counted)
    config = dataclasses.replace(small[0], max_position_embeddings=2**22)
    engine = EngineConfig(kv_memory=2**20, max_batch=1, threads=1, dtype=dtype)
    runner = choose_runner(config, small[1], engine, 2**22, quiet)
    assert max(positions) == runner.num_blocks * BLOCK_SIZE < 2**14


def test_the_options_reach_the_runner(small: tuple[ModelConfig, ModelWeights]) -> None:
    """dtype and kv_dtype decide what serves, the memory alone in how many blocks; what the fused step lacks is said."""
    engine = EngineConfig(kv_memory=2**20, max_batch=1, threads=1, dtype="bfloat16", kv_dtype="int8")
    completion: list[str] = []
    runner = choose_runner(*small, engine, 128, completion.append)
    assert runner.name == "torch-bfloat16-kv-int8"
    assert runner.num_blocks == 2**20 // TorchRunner.block_bytes(small[0], torch.bfloat16, "int8")
    assert "the fused step does not compute in bfloat16" in completion[-1]
    fp8 = choose_runner(*small, dataclasses.replace(engine, dtype="auto", kv_dtype="fp8"), 128, quiet)
    assert fp8.name == "torch-float32-kv-fp8"
    output = fp8.run(step_of([(Paged(random_tokens(20), [0, 1]), 20)]))
    assert bool(output.logits.isfinite().all())


def test_a_small_batch_leaves_its_memory_to_prefixes(small: tuple[ModelConfig, ModelWeights]) -> None:
    """One sequence at a time, of 8 blocks at most: what five of them began with is all found again."""
    limits = EngineConfig(kv_memory=2**20, max_batch=1, threads=1, dtype="float32", kv_dtype="int8")
    client = EngineClient(Engine(choose_runner(*small, limits, 8 * BLOCK_SIZE, quiet), max_batch=1, step_tokens=128))
    prompts = [random_tokens(100, seed).tolist() for seed in range(5)]
    for turn in range(2):
        asked = [client.submit(5 * turn + number, prompt, 1) for number, prompt in enumerate(prompts)]
        client.run()
    assert [sequence.num_cached for sequence in asked] == [96] * 5
