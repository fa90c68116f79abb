"""Turns a GGUF file of a llama-family model into a Hugging Face directory, losing nothing.

GGUF is llama.cpp's file format. Its quantised tensors are expanded to float32: every value of a quantised block is
a short product and sum of half floats that float32 holds, so the conversion adds no error of its own and each runner
chooses its serving precision from the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.errors import ModelError

_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# Pre-tokenizers by GGUF's name for them; each is what the models under that name were trained with.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PATTERN = _QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_CONTROL_TOKEN, _USER_TOKEN = 3, 4

Progress = Callable[[str], None]


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Writes ``config.json``, ``model.safetensors`` (float32), ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        source: the ``.gguf`` file.
        target: an existing, empty directory.
        progress: gets one short sentence for each step.

    Raises:
        ModelError: the file is not GGUF, or holds an architecture or a tokenizer that is not supported.
    """
    from gguf import GGUFReader

    progress(f"reading {source.name}")
    try:
        reader = GGUFReader(str(source))
    except (ValueError, OSError, IndexError) as error:
        raise ModelError(f"{source}: not a readable GGUF file ({error})") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = str(fields.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{source}: general.architecture is {architecture!r}, expected one of {', '.join(_ARCHITECTURES)}"
        )
    names = {tensor.name for tensor in reader.tensors}
    config = _hf_config(fields, architecture, tied="output.weight" not in names)
    _write_json(target / "config.json", config)
    _write_tokenizer(fields, source, target)
    _write_weights(reader, config, architecture, target / "model.safetensors", progress)


def _hf_config(fields: Mapping[str, Any], architecture: str, tied: bool) -> dict[str, Any]:
    model_type, class_name = _ARCHITECTURES[architecture]

    def field(name: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{name}", default)

    heads = field("attention.head_count")
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": field("attention.key_length", field("embedding_length") // heads),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": _short_float(field("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": field("rope.freq_base", 10000.0),
        "tie_word_embeddings": tied,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }


def _short_float(value: float) -> float:
    """GGUF stores 1e-5 as a float32; give back the decimal that was meant."""
    return float(f"{value:.6g}")


def _write_weights(reader: Any, config: Mapping[str, Any], architecture: str, path: Path, progress: Progress) -> None:
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    tensors: dict[str, npt.NDArray[np.float32]] = {}
    total = len(reader.tensors)
    for index, tensor in enumerate(reader.tensors):
        if index % 60 == 0:
            progress(f"expanding weights to float32: {100 * index // total} %")
        if tensor.name == "rope_freqs.weight":
            raise ModelError("rope_freqs.weight: scaled rotary frequencies in GGUF are not supported; use safetensors")
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = tensor.name.split(".")[-2]
        if architecture == "llama" and kind in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
            weight = _rotate_half_order(weight, heads)
        tensors[_hf_name(tensor.name)] = np.ascontiguousarray(weight)
    progress("writing safetensors")
    save_file(tensors, path, metadata={"format": "pt"})


def _hf_name(name: str) -> str:
    *middle, kind, suffix = name.split(".")
    if not middle and kind in _TOP_TENSORS:
        return f"{_TOP_TENSORS[kind]}.{suffix}"
    if len(middle) == 2 and middle[0] == "blk" and kind in _TENSORS:
        return f"model.layers.{middle[1]}.{_TENSORS[kind]}.{suffix}"
    raise ModelError(f"tensor {name!r} has no place in a llama-family decoder")


def _rotate_half_order(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undoes llama.cpp's reordering of rotary pairs: it rotates neighbours (2i, 2i+1), Hugging Face (i, i + d/2)."""
    rows = weight.shape[0]
    paired = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(fields: Mapping[str, Any], source: Path, target: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitters: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "qwen2": [pre_tokenizers.Split(Regex(_QWEN2_PATTERN), "isolated"), byte_level],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), "isolated"), byte_level],
    }
    if kind != "gpt2" or pre not in splitters:
        raise ModelError(
            f"{source}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported in GGUF "
            f"(supported: 'gpt2' with {', '.join(splitters)}); use the model's safetensors directory"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters[pre])
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if token_type == _CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_TOKEN:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    if fields.get("tokenizer.ggml.add_bos_token"):
        _prepend_bos(tokenizer, tokens[fields["tokenizer.ggml.bos_token_id"]])
    tokenizer.save(str(target / "tokenizer.json"))
    special = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"]]
        for name in ("bos", "eos")
        if f"tokenizer.ggml.{name}_token_id" in fields
    }
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    if template := fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    _write_json(target / "tokenizer_config.json", settings)


def _prepend_bos(tokenizer: Any, bos: str) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
