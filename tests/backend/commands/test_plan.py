"""``keepgate plan``: published figures of known models, and the command's output."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open

from backend.commands.plan import as_text, make_plan
from backend.engine.config import ComputeDtype, EngineConfig
from backend.model import load_part
from backend.model_loader.linears import linears
from backend.model_loader.source import ModelSource
from backend.model_loader.weights import ModelWeights, read_config
from backend.models.config import KvDtype, ModelConfig
from backend.models.hf_config import read_hf_config
from backend.models.partition import partition
from backend.models.sizes import Precision, count_parameters, kv_bytes_per_token, weight_bytes
from backend.runners.choice import choose_runner
from backend.runners.fused.huge_pages import Arena
from backend.runners.fused.runner import FusedRunner
from tests.backend.conftest import built_library, quiet
from tests.backend.runners import fused_schemes

_LLAMA2 = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def llama2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        **_LLAMA2,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SEVEN = llama2(4096, 11008, 32, 32, 32)
THIRTEEN = llama2(5120, 13824, 40, 40, 40)
SEVENTY = llama2(8192, 28672, 80, 64, 8)


@pytest.mark.parametrize(
    ("values", "parameters", "kv_per_token", "kv_of_a_sequence"),
    [
        (SEVEN, 6_738_415_616, 512 * 2**10, 2 * 2**30),
        (THIRTEEN, 13_015_864_320, 800 * 2**10, 3.125 * 2**30),
        (SEVENTY, 68_976_648_192, 320 * 2**10, 1.25 * 2**30),
    ],
    ids=["7B", "13B", "70B"],
)
def test_llama_2_has_its_published_figures(
    values: dict[str, Any], parameters: int, kv_per_token: int, kv_of_a_sequence: float
) -> None:
    """Llama 2 has its published number of weights and 2·L·n_kv·d·s bytes of KV at 4,096 tokens in half precision."""
    config = read_hf_config(values, "config.json")
    assert count_parameters(config).total == parameters
    by_formula = 2 * values["num_hidden_layers"] * values["num_key_value_heads"] * config.head_dim * 2
    assert kv_bytes_per_token(config, "bfloat16") == by_formula == kv_per_token
    plan = make_plan("llama", config, 80 * 2**30)
    last = plan.rows[-1]
    assert (last.tokens, last.kv_bytes["bfloat16"]) == (4096, kv_of_a_sequence)
    assert plan.weight_bytes["bfloat16"] == 2 * parameters
    assert plan.weight_bytes["float32"] == 4 * parameters
    for precision, batch in last.batch.items():
        left = 80 * 2**30 - plan.weight_bytes[precision]
        kv = kv_of_a_sequence * (2 if precision == "float32" else 1)
        assert last.kv_bytes[precision] == kv
        assert batch == max(0, int(left // kv))


def test_a_seven_billion_model_on_24_gb() -> None:
    """A 7B model on 24 GB fits 4 sequences of 4,096 tokens in half precision, none in full, and 9 with int8 KV."""
    config = read_hf_config(SEVEN, "config.json")
    plan = make_plan("llama", config, 24 * 10**9)
    assert plan.rows[-1].batch["float32"] == 0
    assert plan.rows[-1].batch["bfloat16"] == 4
    assert plan.rows[0].batch["bfloat16"] == 39
    assert make_plan("llama", config, 24 * 10**9, "int8").rows[-1].batch["bfloat16"] == 9
    assert kv_bytes_per_token(config, "float32", "fp8") == 2 * 32 * 32 * (128 + 4)
    text = as_text(plan)
    assert "6.74 billion" in text
    assert "512.0 KiB a token (2 bytes a number); beside float32 weights 1,024.0 KiB (4 bytes)" in text
    assert "does not fit" in text
    assert max(map(len, text.splitlines())) <= 100
    text = as_text(make_plan("llama", config, 24 * 10**9, "int8"))
    assert "264.0 KiB a token (int8 with a scale for each vector)" in text
    assert "4 bytes" not in text


@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_dtype", "precision"),
    [
        ("auto", "none", "auto", "bfloat16"),
        ("auto", "int8", "int8", "int8"),
        ("float32", "none", "auto", "float32"),
        ("bfloat16", "none", "auto", "bfloat16"),
        ("float32", "none", "fp8", "float32"),
    ],
)
def test_the_kv_memory_is_what_the_runner_takes(
    config: ModelConfig,
    weights: ModelWeights,
    dtype: ComputeDtype,
    quantization: Literal["none", "int8", "int4"],
    kv_dtype: KvDtype,
    precision: Precision,
) -> None:
    """The planned KV bytes per token are those of the runner that the engine chooses on a CPU."""
    engine = EngineConfig(kv_memory=2**23, dtype=dtype, quantization=quantization, kv_dtype=kv_dtype, threads=1)
    runner = choose_runner(config, weights, engine, 64, quiet)
    if dtype == "auto" and not runner.name.startswith("fused"):
        pytest.skip(f"the fused step is not to be had here: {runner.name} serves")
    assert kv_bytes_per_token(config, precision, kv_dtype) == runner.kv_bytes_per_token


def test_a_model_that_only_torch_computes_says_so() -> None:
    """The plan says that torch computes a model with sliding windows on a CPU, where KV takes more bytes."""
    values = {**SEVEN, "model_type": "mistral", "sliding_window": 1024}
    text = as_text(make_plan("m", read_hf_config(values, "config.json"), 24 * 10**9))
    assert "On a CPU torch computes this model, which has sliding-window attention:" in text
    assert "torch computes" not in as_text(make_plan("m", read_hf_config(SEVEN, "c"), 24 * 10**9))


def test_four_bit_weights_take_five_bits_with_scales() -> None:
    """Four-bit weights take five bits with scales, the head eight and a quarter, and the embedding sixteen."""
    parameters = count_parameters(read_hf_config(SEVEN, "config.json"))
    assert parameters.embedding == 32000 * 4096
    head = parameters.embedding * 33 // 32
    expected = parameters.layers * 5 // 8 + head + 2 * parameters.embedding + 2 * parameters.norms_and_biases
    assert weight_bytes(parameters, "int4") == expected


@pytest.mark.parametrize(
    ("precision", "planned"),
    [("float16", "bfloat16"), ("int8", "int8"), ("fp8", "fp8"), ("int4", "int4"), ("nf4", "nf4")],
)
def test_the_planned_weights_are_what_the_runner_keeps(
    config: ModelConfig,
    weights: ModelWeights,
    precision: str,
    planned: Precision,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planned weight bytes of the bundled model are within 2% of what the runner keeps."""
    kept = 0
    keep = Arena.copy

    def counted(arena: Arena, tensor: torch.Tensor) -> int:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return keep(arena, tensor)

    monkeypatch.setattr(Arena, "copy", counted)
    FusedRunner(built_library(), config, fused_schemes.kept(weights, precision), 4, 64, 1)
    plan = make_plan("m", config, 2**30)
    twice = plan.tied_head_bytes if precision == "float16" else 0
    assert twice is not None
    assert plan.weight_bytes[planned] + twice == pytest.approx(kept, rel=0.02)


def test_the_count_is_that_of_the_files(source: ModelSource) -> None:
    """The number of weights of the bundled model is that of its files."""
    config = read_hf_config(json.loads((source.directory / "config.json").read_text()), "config.json")
    stored = 0
    for path in source.directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    assert count_parameters(config).total == stored


def test_mixtral_has_its_published_number_of_weights() -> None:
    """Mixtral 8x7B has 46.7 billion weights, which all count as memory."""
    values = {
        **_LLAMA2,
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
    }
    assert count_parameters(read_hf_config(values, "config.json")).total == 46_702_792_704


async def command(*words: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("keepgate")),
        "plan",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_command_plans_from_a_config_alone(tmp_path: Path) -> None:
    """The command needs a config.json only, and its JSON has every figure in bytes."""
    (tmp_path / "config.json").write_text(json.dumps(SEVENTY))
    status, out, err = await command(str(tmp_path), "--memory", "80GiB")
    assert (status, err) == (0, "")
    assert "320.0 KiB a token" in out
    status, out, _ = await command(str(tmp_path / "config.json"), "--memory", "80GiB", "--kv-dtype", "int8", "--json")
    assert status == 0
    plan = json.loads(out)
    assert set(plan["kv_bytes_per_token"].values()) == {2 * 80 * 8 * (128 + 4)}
    assert plan["rows"][-1]["tokens"] == 4096


async def test_a_closed_pipe_ends_the_command_by_sigpipe(tmp_path: Path) -> None:
    """A closed output pipe ends the command by SIGPIPE without a message."""
    (tmp_path / "config.json").write_text(json.dumps(SEVENTY))
    for words in ([str(tmp_path), "--memory", "80GiB"], ["--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("keepgate")),
            "plan",
            *words,
            stdout=writer,
            stderr=asyncio.subprocess.PIPE,
        )
        os.close(writer)
        _, err = await process.communicate()
        assert (process.returncode, err) == (-signal.SIGPIPE, b"")


def test_the_plan_of_ranks_adds_up() -> None:
    """Llama 2 70B on 16 ranks: each KV head is in two of them, and all else that is planned is what one process has."""
    config = read_hf_config(SEVENTY, "config.json")
    whole, divided = make_plan("llama", config, 320 * 2**30), make_plan("llama", config, 320 * 2**30, "auto", 16)
    assert [rank.heads for rank in divided.ranks] == [(4 * rank, 4 * rank + 4) for rank in range(16)]
    assert [rank.kv_heads for rank in divided.ranks] == [(rank // 2, rank // 2 + 1) for rank in range(16)]
    kv_projections, norms = 2 * 2 * 80 * 8 * 128 * 8192, 15 * 2 * (2 * 80 + 1) * 8192
    assert divided.replicated_bytes["bfloat16"] == kv_projections + norms
    assert divided.weight_bytes["bfloat16"] == whole.weight_bytes["bfloat16"] + kv_projections + norms
    assert divided.kv_bytes_per_token == whole.kv_bytes_per_token
    left = 320 * 2**30 - divided.weight_bytes["bfloat16"]
    assert divided.kv_blocks["bfloat16"] == left // (16 * whole.kv_bytes_per_token["bfloat16"])
    text = as_text(divided)
    assert "16 ranks, which share the KV memory" in text
    assert "Up to 2 ranks have the projections of the same KV head" in text


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 3), (2, 2)])
def test_the_planned_weights_of_a_rank_are_what_it_loads(tensor: int, stages: int, source: ModelSource) -> None:
    """Each rank of the bundled model has as many bytes of weights as planned, in the files' 32 bits."""
    config = read_config(source.directory)
    plan = make_plan("m", config, 2**30, "auto", tensor, stages)
    assert plan.tied_in_stages == (stages > 1)
    for part, rank in zip(partition(config, tensor, stages), plan.ranks, strict=True):
        weights, _ = load_part(source.directory, config, part, "none")
        numbers = sum(math.prod(weight.shape) for weight in linears(weights).values())
        numbers += 2 * len(part.layers) * config.hidden_size + config.hidden_size
        numbers += weights.embedding.numel() if part.is_first or part.is_last else 0
        assert rank.weight_bytes["float32"] == 4 * numbers
        assert (rank.layers, rank.vocabulary) == tuple((of.start, of.stop) for of in (part.layers, part.vocabulary))


def test_ranks_with_devices_have_as_many_blocks_as_the_fullest_one_holds() -> None:
    """Blocks of each precision fit every device beside its weights, and one more does not fit one of them."""
    memory = 80 * 2**30
    plan = make_plan("m", read_hf_config(SEVENTY, "config.json"), memory, "auto", 4, 1, on_devices=True)
    assert plan.devices == 4
    for name in ("bfloat16", "int4"):
        tokens = plan.kv_tokens[name]
        room = [memory - rank.weight_bytes[name] - tokens * rank.kv_bytes_per_token[name] for rank in plan.ranks]
        assert min(room) >= 0
        assert any(left < rank.kv_bytes_per_token[name] for left, rank in zip(room, plan.ranks, strict=True))
        assert plan.kv_blocks[name] == tokens // 16
    assert "on each of 4 devices" in as_text(plan)
    assert "4 ranks, each with a device" in as_text(plan)


async def test_the_command_plans_ranks(tmp_path: Path) -> None:
    """The command prints a row for each rank, and refuses a division that there is not."""
    (tmp_path / "config.json").write_text(json.dumps(SEVENTY))
    words = (str(tmp_path), "--memory", "320GiB")
    status, out, err = await command(*words, "--tensor-parallel", "2", "--pipeline-parallel", "2", "--json")
    assert (status, err) == (0, "")
    assert [rank["layers"] for rank in json.loads(out)["ranks"]] == [[0, 40], [0, 40], [40, 80], [40, 80]]
    status, out, _ = await command(*words, "--tensor-parallel", "2", "--device", "cuda", "--json")
    assert (status, json.loads(out)["devices"]) == (0, 2)
    status, _, err = await command(*words, "--pipeline-parallel", "81")
    assert (status, err.count("\n")) == (1, 1)
    assert "--pipeline-parallel 81: this model has 80 layers, expected at most as many stages" in err
