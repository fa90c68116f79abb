"""Stored keys and values are read back exactly, or within the bound of their format."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.config import ComputeDtype, EngineConfig
from backend.engine.engine import Engine
from backend.engine.model_runner import BLOCK_SIZE
from backend.model_loader.weights import ModelWeights
from backend.models import rope
from backend.models.config import KvDtype, ModelConfig, Rope
from backend.models.rope import rotations
from backend.runners.choice import choose_runner
from backend.runners.torch import runner as torch_runner
from backend.runners.torch.kv_memory import KvMemory
from backend.runners.torch.runner import TorchRunner
from tests.backend.conftest import quiet
from tests.backend.models.test_config import read
from tests.backend.random_models import Paged, random_tokens, relative_error, step_of
from tests.backend.tiny_model import EngineClient

CONFIG = read(num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def stored(vectors: torch.Tensor, kv_dtype: KvDtype) -> torch.Tensor:
    """The keys that a memory returns after these vectors [T, 2, 8] were written as keys of layer 1."""
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
    """Stored elements are exact for auto, and within half a step for int8 and 1/16 or half a step for fp8."""
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
    """`block_bytes` is what is allocated for a block, scales included."""
    memory = KvMemory(CONFIG, 3, torch.bfloat16, kv_dtype)
    held = [tensor for tensor in vars(memory).values() if isinstance(tensor, torch.Tensor)]
    expected = 2 * CONFIG.num_layers * BLOCK_SIZE * 2 * (8 * element + scale)
    assert KvMemory.block_bytes(CONFIG, torch.bfloat16, kv_dtype) == expected
    assert sum(tensor.nbytes for tensor in held) == 3 * expected


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_nan_stays_with_its_token(kv_dtype: KvDtype, broken: float) -> None:
    """A NaN or infinity is never read back as a finite number, and other tokens keep their values."""
    vectors = torch.ones(3, 2, 8)
    vectors[1, 0, 3] = broken
    got = stored(vectors, kv_dtype)
    assert not bool(got[1, 0, 3].isfinite())
    assert torch.allclose(got[[0, 2]], vectors[[0, 2]])


@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.02), ("fp8", 0.1)])
def test_quantised_memory_changes_logits_little(
    random_llama: tuple[ModelConfig, ModelWeights], kv_dtype: KvDtype, most: float
) -> None:
    """Quantised KV memory changes the logits, and less than its bound."""
    outputs = []
    kinds: tuple[KvDtype, ...] = ("auto", kv_dtype)
    for each in kinds:
        runner = TorchRunner(*random_llama, 8, 128, kv_dtype=each)
        sequence = Paged(random_tokens(60), [3, 1, 7, 0])
        steps = [step_of([(sequence, count)]) for count in (50, 1, 1, 8)]
        outputs.append(torch.cat([runner.run(step).logits for step in steps]))
    exact, rounded = outputs
    assert 1e-5 < relative_error(rounded, exact) < most


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_rotary_table_is_as_long_as_the_kv_memory(
    random_llama: tuple[ModelConfig, ModelWeights], dtype: ComputeDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotary table has as many positions as the KV memory, not as the model's maximum."""
    positions: list[int] = []

    def counted(which: Rope, head_dim: int, count: int) -> torch.Tensor:
        positions.append(count)
        return rotations(which, head_dim, count)

    monkeypatch.setattr(rope, "rotations", counted)
    monkeypatch.setattr(torch_runner, "rotations", counted)
    config = dataclasses.replace(random_llama[0], max_position_embeddings=2**22)
    engine = EngineConfig(kv_memory=2**20, max_batch=1, threads=1, dtype=dtype)
    runner = choose_runner(config, random_llama[1], engine, 2**22, quiet)
    assert max(positions) == runner.num_blocks * BLOCK_SIZE < 2**14


def test_the_options_reach_the_runner(random_llama: tuple[ModelConfig, ModelWeights]) -> None:
    """dtype and kv_dtype choose the runner and the block size; a message says what the fused step does not support."""
    engine = EngineConfig(kv_memory=2**20, max_batch=1, threads=1, dtype="bfloat16", kv_dtype="int8")
    completion: list[str] = []
    runner = choose_runner(*random_llama, engine, 128, completion.append)
    assert runner.name == "torch-bfloat16-kv-int8"
    assert runner.num_blocks == 2**20 // TorchRunner.block_bytes(random_llama[0], torch.bfloat16, "int8")
    choose_runner(*random_llama, dataclasses.replace(engine, dtype="float32"), 128, completion.append)
    assert "the fused step does not compute in float32" in completion[-1]
    fp8 = choose_runner(*random_llama, dataclasses.replace(engine, dtype="auto", kv_dtype="fp8"), 128, quiet)
    assert fp8.name == "torch-float32-kv-fp8"
    output = fp8.run(step_of([(Paged(random_tokens(20), [0, 1]), 20)]))
    assert bool(output.logits.isfinite().all())


def test_a_small_batch_leaves_its_memory_to_prefixes(random_llama: tuple[ModelConfig, ModelWeights]) -> None:
    """With a batch of one, the rest of the KV memory caches the prefixes of earlier sequences."""
    limits = EngineConfig(kv_memory=2**20, max_batch=1, threads=1, dtype="float32", kv_dtype="int8")
    client = EngineClient(
        Engine(choose_runner(*random_llama, limits, 8 * BLOCK_SIZE, quiet), max_batch=1, step_tokens=128)
    )
    prompts = [random_tokens(100, seed).tolist() for seed in range(5)]
    for turn in range(2):
        asked = [client.submit(5 * turn + number, prompt, 1) for number, prompt in enumerate(prompts)]
        client.run()
    assert [sequence.num_cached for sequence in asked] == [96] * 5
