"""What engines of vLLM have in common that share blocks, on stand-ins for vLLM's configuration."""

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefix_store.connectors.vllm_support import fingerprint_of
from prefix_store.frames.layout import BlockLayout

LAYOUT = BlockLayout("bfloat16", (2, 2, 16, 8))
Change = Callable[[Any], Any]


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """A ``VllmConfig`` of a model in a folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    hf_text_config = {
        "_name_or_path": str(folder),
        "transformers_version": "5.17",
        "dtype": "bfloat16",
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 10_000.0},
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            tokenizer=str(folder),
            revision=None,
            tokenizer_revision=None,
            quantization=None,
            enforce_eager=False,
            dtype="torch.bfloat16",
            max_model_len=4096,
            served_model_name="model",
            seed=0,
            hf_text_config=SimpleNamespace(values=hf_text_config, to_dict=lambda: hf_text_config),
        ),
        cache_config=SimpleNamespace(
            block_size=16, cache_dtype="auto", num_gpu_blocks=1000, gpu_memory_utilization=0.9, swap_space=4
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, world_size=2, data_parallel_rank=0, master_port=1),
        scheduler_config=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=8192),
        instance_id="a1b2",
        kv_transfer_config=SimpleNamespace(engine_id="x", kv_port=14579),
    )


def digest(
    config: Any, version: str = "0.32.0", attention: Any = ("FLASH_ATTN",), layout: Any = LAYOUT, rank: int = 0
) -> bytes:
    return asyncio.run(fingerprint_of(config, version, attention, layout, rank)).digest


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("model_config", "max_model_len", 2048),
        ("model_config", "served_model_name", "another"),
        ("model_config", "seed", 7),
        ("cache_config", "num_gpu_blocks", 2000),
        ("cache_config", "gpu_memory_utilization", 0.5),
        ("cache_config", "swap_space", 0),
        ("parallel_config", "data_parallel_rank", 1),
        ("parallel_config", "master_port", 2),
        ("scheduler_config", "max_num_seqs", 1),
        ("scheduler_config", "max_num_batched_tokens", 512),
        ("kv_transfer_config", "engine_id", "y"),
        ("kv_transfer_config", "kv_port", 1),
    ],
)
def test_what_is_of_one_start_does_not_count(config: Any, part: str, field: str, value: Any) -> None:
    """An engine that starts again with more memory, another port or another length finds its blocks."""
    before = digest(config)
    setattr(getattr(config, part), field, value)
    config.instance_id = "c3d4"
    assert digest(config) == before


@pytest.mark.parametrize("name", ["_name_or_path", "transformers_version", "dtype", "torch_dtype"])
def test_what_a_config_says_of_its_file_does_not_count(config: Any, name: str) -> None:
    """Nor what is said elsewhere."""
    before = digest(config)
    config.model_config.hf_text_config.values[name] = "another"
    assert digest(config) == before


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("model_config", "dtype", "torch.float16"),
        ("model_config", "quantization", "fp8"),
        ("model_config", "enforce_eager", True),
        ("cache_config", "block_size", 32),
        ("cache_config", "cache_dtype", "fp8"),
        ("parallel_config", "tensor_parallel_size", 4),
    ],
)
def test_what_changes_a_block_counts(config: Any, part: str, field: str, value: Any) -> None:
    """Settings of the engine."""
    before = digest(config)
    setattr(getattr(config, part), field, value)
    assert digest(config) != before


@pytest.mark.parametrize("name", ["num_hidden_layers", "rope_parameters", "max_position_embeddings", "new"])
def test_what_the_model_is_counts(config: Any, name: str) -> None:
    """All that its config says of it."""
    before = digest(config)
    config.model_config.hf_text_config.values[name] = {"another": 1}
    assert digest(config) != before


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_its_files_count(config: Any, file: str) -> None:
    """By their contents, wherever they are."""
    before = digest(config)
    folder = Path(config.model_config.model)
    moved = folder.rename(folder.with_name("moved"))
    config.model_config.model = config.model_config.tokenizer = str(moved)
    assert digest(config) == before
    (moved / file).write_bytes(b"other")
    assert digest(config) != before


@pytest.mark.parametrize(
    "named",
    [
        {"version": "0.33.0"},
        {"attention": ("FLASHINFER",)},
        {"attention": ("FLASH_ATTN", "FLASHINFER")},
        {"layout": BlockLayout("bfloat16", (2, 2, 16, 16))},
        {"layout": BlockLayout("float16", (2, 2, 16, 8))},
        {"rank": 1},
    ],
)
def test_kernels_layout_and_part_count(config: Any, named: dict[str, Any]) -> None:
    """Each worker has blocks of its own."""
    assert digest(config, **named) != digest(config)


def test_the_order_of_layers_does_not_count(config: Any) -> None:
    """Kernels are a set."""
    assert digest(config, attention=("a", "b", "a")) == digest(config, attention=iter(("b", "a")))
    assert digest(copy.deepcopy(config)) == digest(config)
