"""Turns a GGUF file into a Hugging Face directory, losing nothing.

GGUF is llama.cpp's file format. Its quantised tensors are expanded to float32: every value of a quantised block is
a short product and sum of half floats that float32 holds, so the conversion adds no error of its own and each runner
chooses its serving precision from the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.errors import ModelError
from backend.gguf_config import GgufMetadata, hf_config
from backend.gguf_tokenizer import write_tokenizer

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
_GEMMA_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# All experts of a layer are one tensor [experts, out, in]; "{}" is where the number of the expert goes.
_QWEN3_EXPERT_TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_TENSORS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_DIVISORS = "rope_freqs.weight"
_SHARD_BYTES = 2**30
"""Expanded weights that are held in memory before they are written out."""

Progress = Callable[[str], None]
Array = npt.NDArray[np.float32]


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Writes ``config.json``, ``model*.safetensors`` (float32), ``tokenizer.json`` and ``tokenizer_config.json``.

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
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    metadata = GgufMetadata(fields, tensors.keys(), str(source))
    divisors = tensors.pop(_ROPE_DIVISORS, None)
    config = hf_config(metadata, None if divisors is None else _expanded(divisors))
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(metadata, target)
    _write_weights(list(tensors.values()), metadata, config, target, progress)


def _write_weights(
    tensors: list[Any], metadata: GgufMetadata, config: dict[str, Any], target: Path, progress: Progress
) -> None:
    """One file after the other, so that memory holds little more than one of them; named as transformers wants it."""
    from safetensors.numpy import save_file

    shard: dict[str, Array] = {}
    names: list[list[str]] = []  # of the tensors of each file
    sizes = 0

    def write() -> None:
        nonlocal sizes
        progress("writing safetensors")
        save_file(shard, target / f"{len(names)}.safetensors", metadata={"format": "pt"})
        names.append(list(shard))
        sizes += sum(array.nbytes for array in shard.values())
        shard.clear()

    for index, tensor in enumerate(tensors):
        if index % 60 == 0:
            progress(f"expanding weights to float32: {100 * index // len(tensors)} %")
        shard.update(_hf_tensors(tensor, metadata, config))
        if sum(array.nbytes for array in shard.values()) >= _SHARD_BYTES:
            write()
    if shard:
        write()
    if len(names) == 1:
        (target / "0.safetensors").rename(target / "model.safetensors")
        return
    files = {number: f"model-{number + 1:05}-of-{len(names):05}.safetensors" for number in range(len(names))}
    for number, file in files.items():
        (target / f"{number}.safetensors").rename(target / file)
    contents = {
        "metadata": {"total_size": sizes},
        "weight_map": {name: files[number] for number, of in enumerate(names) for name in of},
    }
    (target / "model.safetensors.index.json").write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def _expanded(tensor: Any) -> Array:
    from gguf.quants import dequantize

    return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _hf_tensors(tensor: Any, metadata: GgufMetadata, config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """What Hugging Face's files hold for one tensor: its name there and its values; of experts, one for each."""
    name, weight = _hf_name(tensor.name, metadata), _expanded(tensor)
    kind = tensor.name.split(".")[-2]
    if metadata.rotates_neighbours and kind in ("attn_q", "attn_k"):
        weight = _rotate_half_order(
            weight, config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
        )
    if metadata.is_gemma and kind.endswith("norm"):
        weight = weight - 1
    if "{}" not in name:
        yield name, np.ascontiguousarray(weight)
        return
    for expert, part in enumerate(weight):
        yield name.format(expert), np.ascontiguousarray(part)


def _hf_name(name: str, metadata: GgufMetadata) -> str:
    place, _, suffix = name.rpartition(".")
    *middle, kind = place.split(".")
    known = _TENSORS
    if metadata.is_gemma:
        known = _TENSORS | _GEMMA_TENSORS
    elif metadata.get("expert_count"):
        known = _TENSORS | (_MIXTRAL_TENSORS if metadata.is_mixtral else _QWEN3_EXPERT_TENSORS)
    if not middle and kind in _TOP_TENSORS:
        return f"{_TOP_TENSORS[kind]}.{suffix}"
    if len(middle) == 2 and middle[0] == "blk" and kind in known:
        return f"model.layers.{middle[1]}.{known[kind]}.{suffix}"
    raise ModelError(f"{metadata.source}: tensor {name} has no place in a {metadata.architecture} decoder")


def _rotate_half_order(weight: Array, heads: int) -> Array:
    """Undoes llama.cpp's reordering of rotary pairs: it rotates neighbours (2i, 2i+1), Hugging Face (i, i + d/2)."""
    rows = weight.shape[0]
    paired = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)
