"""Turns a GGUF file into a Hugging Face directory.

GGUF is llama.cpp's file format. Its quantised tensors are expanded to float32: every value of a quantised block is
a short product and sum of half floats that float32 holds, so the conversion adds no error of its own and each runner
chooses its serving precision from the same numbers. Or they stay in the bits that they have, where a scheme holds their
blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from backend.errors import ModelError
from backend.gguf_config import GgufMetadata, hf_config
from backend.gguf_tokenizer import write_tokenizer

if TYPE_CHECKING:
    import torch

    from backend.quantization.files.quantized_modules import QuantizedModules

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
_NOT_LINEAR = ("token_embd", "ffn_gate_inp")
"""Matrices that are wanted as floats: the embedding, and what chooses experts."""
_ROPE_DIVISORS = "rope_freqs.weight"
_SHARD_BYTES = 2**30
"""Weights that are held in memory before they are written out."""

Progress = Callable[[str], None]
Array = npt.NDArray[np.float32]


def convert_gguf(source: Path, target: Path, progress: Progress, packed: bool = False) -> None:
    """Writes ``config.json``, ``model*.safetensors``, ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        source: the ``.gguf`` file.
        target: an existing, empty directory.
        progress: gets one short sentence for each step.
        packed: whether linear layers in Q4_0, Q4_1, Q8_0 and Q4_K stay in these bits; all else is float32.

    Raises:
        ModelError: the file is not GGUF, or holds an architecture or a tokenizer that is not supported; or the
            directory cannot be written.
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
    write_tokenizer(metadata, target)
    try:
        of_weights = _write_weights(list(tensors.values()), metadata, config, target, progress, packed)
        (target / "config.json").write_text(json.dumps(config | of_weights, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{target}: cannot be written ({error})") from error


def _write_weights(
    tensors: list[Any],
    metadata: GgufMetadata,
    config: dict[str, Any],
    target: Path,
    progress: Progress,
    packed: bool,
) -> dict[str, Any]:
    """Gives back what config.json is to say of them."""
    from backend.quantization.files.quantized_modules import QuantizedModules
    from backend.quantization.files.shards import Shards

    shards, kept = Shards(target, _SHARD_BYTES), QuantizedModules("float32")
    for index, tensor in enumerate(tensors):
        if index % 60 == 0:
            progress(f"writing weights as safetensors: {100 * index // len(tensors)} %")
        for name, weight in _hf_tensors(tensor, metadata, config, kept if packed else None):
            shards.add(name, weight)
    shards.close()
    return kept.config()


def _expanded(tensor: Any) -> Array:
    from gguf.quants import dequantize

    return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _hf_tensors(
    tensor: Any, metadata: GgufMetadata, config: dict[str, Any], kept: QuantizedModules | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """What Hugging Face's files hold for one tensor: names there and values; of experts, each its own.

    Args:
        kept: takes linear layers that stay as they are; None: there are none.
    """
    import torch

    from backend.quantization.files.gguf_blocks import KINDS, blocks_linear

    name = _hf_name(tensor.name, metadata)
    kind = tensor.name.split(".")[-2]
    rows = None
    if metadata.rotates_neighbours and kind in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
        rows = _rotate_half_order(np.arange(tensor.data.shape[0]), heads)
    is_linear = kept is not None and name.endswith(".weight") and len(tensor.shape) > 1 and kind not in _NOT_LINEAR
    stay = is_linear and tensor.tensor_type.name in KINDS
    values = tensor.data if stay else _expanded(tensor)
    if metadata.is_gemma and kind.endswith("norm"):
        values = values - 1
    if rows is not None:
        values = values[rows]
    for number, part in enumerate(values if "{}" in name else [values]):
        full_name = name.format(number)
        module = full_name.removesuffix(".weight")
        if kept is not None and stay:
            linear = blocks_linear(tensor.tensor_type.name, part)
            yield from ((f"{module}.{end}", of_module) for end, of_module in kept.parts(module, linear).items())
            continue
        if kept is not None and is_linear:
            kept.left_alone.append(module)
        yield full_name, torch.from_numpy(np.array(part))


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


def _rotate_half_order(rows: npt.NDArray[np.int64], heads: int) -> npt.NDArray[np.int64]:
    """Undoes llama.cpp's reordering of rotary pairs: it rotates neighbours (2i, 2i+1), Hugging Face (i, i + d/2)."""
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
