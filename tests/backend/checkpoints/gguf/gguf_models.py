"""Writes models as GGUF files the way llama.cpp's converter does, with the gguf package's own names for tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from safetensors.numpy import load_file

from tests.backend.random_models import VOCABULARY, Kind, save

ARCHITECTURES = {
    "Llama": MODEL_ARCH.LLAMA,
    "Mixtral": MODEL_ARCH.LLAMA,
    "Qwen2": MODEL_ARCH.QWEN2,
    "Qwen3": MODEL_ARCH.QWEN3,
    "Qwen3Moe": MODEL_ARCH.QWEN3MOE,
    "SmolLM3": MODEL_ARCH.SMOLLM3,
    "Gemma2": MODEL_ARCH.GEMMA2,
    "Gemma3Text": MODEL_ARCH.GEMMA3,
}
_NAMES = {
    MODEL_ARCH.LLAMA: "llama",
    MODEL_ARCH.QWEN2: "qwen2",
    MODEL_ARCH.QWEN3: "qwen3",
    MODEL_ARCH.QWEN3MOE: "qwen3moe",
    MODEL_ARCH.SMOLLM3: "smollm3",
    MODEL_ARCH.GEMMA2: "gemma2",
    MODEL_ARCH.GEMMA3: "gemma3",
}
Array = npt.NDArray[np.float32]


def write_model(kind: Kind, path: Path, quantised: GGMLQuantizationType | None = None) -> Any:
    """Writes a kind of model with random weights to ``path`` and returns transformers' own.

    Args:
        quantised: what linear layers, the embedding too, are rounded to.
    """
    directory = path.parent / f"{path.stem}-reference"
    reference = save(kind, directory)
    architecture = ARCHITECTURES[kind.family]
    writer = GGUFWriter(path, _NAMES[architecture])
    _add_metadata(writer, reference.config)
    if kind.family in ("Mixtral", "Gemma2", "Gemma3Text"):
        _add_sentencepiece_tokenizer(writer)
    else:
        _add_byte_level_tokenizer(writer, "llama-bpe" if kind.family in ("Llama", "SmolLM3") else "qwen2")
    names = get_tensor_name_map(architecture, reference.config.num_hidden_layers)
    for name, weight in _stacked_experts(load_file(directory / "model.safetensors")).items():
        stored = _as_llama_cpp_stores(name, weight, reference.config, architecture)
        gguf_name = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        if quantised is None or stored.ndim == 1:
            writer.add_tensor(gguf_name, stored)
        else:
            writer.add_tensor(gguf_name, quantize(stored, quantised), raw_dtype=quantised)
    if "llama3" in str(reference.config.rope_parameters):
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(reference))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return reference


def _add_metadata(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(rope["factor"])
    if config.model_type in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if experts := getattr(config, "num_local_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if size := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(size)


def _stacked_experts(tensors: dict[str, Array]) -> dict[str, Array]:
    """All experts' matrices of a layer as one tensor, which is how GGUF has them."""
    stacks: dict[str, dict[int, Array]] = {}
    rest = {}
    for name, weight in tensors.items():
        before, experts, after = name.partition(".experts.")
        if not experts:
            rest[name] = weight
            continue
        number, _, part = after.partition(".")
        stacks.setdefault(f"{before}.experts.{part}", {})[int(number)] = weight
    return rest | {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}


def _as_llama_cpp_stores(name: str, weight: Array, config: Any, architecture: MODEL_ARCH) -> Array:
    if architecture in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
        return weight + 1
    if architecture in (MODEL_ARCH.LLAMA, MODEL_ARCH.SMOLLM3) and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    return weight


def _llama3_divisors(reference: Any) -> Array:
    """The divisors of the plain frequencies that give those of transformers."""
    config = reference.config
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    divisors: Array = (plain / reference.model.rotary_emb.inv_freq).float().numpy()
    return divisors


def _add_byte_level_tokenizer(writer: GGUFWriter, pre_tokenizer: str) -> None:
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    tokens = [chr(byte) for byte in alphabet] + [chr(0x100 + index) for index in range(256 - len(alphabet))]
    tokens += ["ab", *(f"<|{index}|>" for index in range(VOCABULARY - len(tokens) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * (VOCABULARY - 257))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.add_eot_token_id(258)


_PIECES = ("▁", "a", "b", "c", "s", "<", ">", "s>", "ab", "bc", "▁a", "▁ab", "abc")
_UNUSED = VOCABULARY - 259 - len(_PIECES)
SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": [
        *("<unk>", "<s>", "</s>"),
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *_PIECES,
        *(f"<unused{index}>" for index in range(_UNUSED)),
    ],
    "scores": [0.0] * 259 + [-float(index) for index in range(len(_PIECES))] + [-1e4] * _UNUSED,
    "token_type": [2, 3, 3] + [6] * 256 + [1] * len(_PIECES) + [5] * _UNUSED,
    "unknown_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "add_space_prefix": False,
}
"""A vocabulary in the fields that GGUF keeps under ``tokenizer.ggml``; the pieces' scores fall one after the other."""


def _add_sentencepiece_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model(SENTENCEPIECE["model"])
    writer.add_token_list(SENTENCEPIECE["tokens"])
    writer.add_token_scores(SENTENCEPIECE["scores"])
    writer.add_token_types(SENTENCEPIECE["token_type"])
    writer.add_unk_token_id(SENTENCEPIECE["unknown_token_id"])
    writer.add_bos_token_id(SENTENCEPIECE["bos_token_id"])
    writer.add_eos_token_id(SENTENCEPIECE["eos_token_id"])
    writer.add_add_space_prefix(SENTENCEPIECE["add_space_prefix"])
