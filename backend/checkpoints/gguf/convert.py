"""Turns a GGUF file into a Hugging Face directory.

GGUF is llama.cpp's file format. Its quantised tensors are expanded to float32: every value of a quantised block is a
short product and sum of half floats and integers, so that the conversion adds no error beyond float32 rounding, and
runners choose their precision from the same numbers. Or they keep their bits, if a scheme supports their blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from backend.checkpoints.gguf.config import GgufMetadata, hf_config
from backend.checkpoints.gguf.header import GgufTensor, read_gguf, shown
from backend.checkpoints.gguf.tensors import Place, check_tensors, tensor_places
from backend.checkpoints.gguf.tokenizer import write_tokenizer
from backend.errors import ModelError
from backend.models.hf_config import read_hf_config

if TYPE_CHECKING:
    import torch

    from backend.checkpoints.quantized.writer import QuantizedModules

_NOT_LINEAR = ("token_embd", "ffn_gate_inp")
"""Matrices that become floats: the embedding, and the router of experts."""
_ROPE_DIVISORS = "rope_freqs.weight"
_SHARD_BYTES = 2**30
"""Most bytes of weights in memory before they are written."""

Progress = Callable[[str], None]
Array = npt.NDArray[np.float32]


def convert_gguf(source: Path, target: Path, progress: Progress, packed: bool = False) -> None:
    """Writes ``config.json``, ``model*.safetensors``, ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        source: the ``.gguf`` file.
        target: an existing, empty directory.
        progress: gets one short sentence for each step.
        packed: whether linear layers in Q4_0, Q4_1, Q8_0 and Q4_K keep their bits; all else is float32.

    Raises:
        ModelError: the file is not GGUF, is invalid or incomplete, or has an architecture or a tokenizer that is not
            supported; or the directory cannot be written. The message names the file.
    """
    progress(f"reading {source.name}")
    file = read_gguf(source)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    metadata = GgufMetadata(file.fields, tensors.keys(), str(source))
    divisors = tensors.pop(_ROPE_DIVISORS, None)
    config = hf_config(metadata, None if divisors is None else _expanded(divisors, metadata))
    places = tensor_places(read_hf_config(config, f"{source}: metadata as config.json"))
    check_tensors(list(tensors.values()), places, metadata)
    try:
        write_tokenizer(metadata, target)
        of_weights = _write_weights(list(tensors.values()), places, metadata, config, target, progress, packed)
        (target / "config.json").write_text(json.dumps(config | of_weights, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{source}: its conversion cannot be written to {target.parent} ({reason})") from error


def _write_weights(
    tensors: list[GgufTensor],
    places: Mapping[str, Place],
    metadata: GgufMetadata,
    config: dict[str, Any],
    target: Path,
    progress: Progress,
    packed: bool,
) -> dict[str, Any]:
    """Returns their part of config.json."""
    from backend.checkpoints.quantized.writer import QuantizedModules
    from backend.checkpoints.shards import Shards

    shards, kept = Shards(target, _SHARD_BYTES), QuantizedModules("float32")
    for index, tensor in enumerate(tensors):
        if index % 60 == 0:
            progress(f"writing weights as safetensors: {100 * index // len(tensors)} %")
        for name, weight in _hf_tensors(tensor, places[tensor.name], metadata, config, kept if packed else None):
            shards.add(name, weight)
    shards.close()
    return kept.config()


def _expanded(tensor: GgufTensor, metadata: GgufMetadata) -> Array:
    """Its values as float32. Raises ModelError for a type that cannot be read, or a value that is not finite."""
    from gguf.quants import dequantize

    try:
        with np.errstate(all="ignore"):  # the values are checked below
            values = np.asarray(dequantize(tensor.data, tensor.type), dtype=np.float32)
    except NotImplementedError as error:
        raise ModelError(
            f"{metadata.source}: tensor {shown(tensor.name)} is of type {tensor.type.name}, which is not a weight's"
        ) from error
    return _finite(values, tensor, metadata)


def _finite(values: Array, tensor: GgufTensor, metadata: GgufMetadata) -> Array:
    if not np.isfinite(values).all():
        raise ModelError(
            f"{metadata.source}: tensor {shown(tensor.name)} holds a value or a scale that is not a finite number"
        )
    return values


def _hf_tensors(
    tensor: GgufTensor, place: Place, metadata: GgufMetadata, config: dict[str, Any], kept: QuantizedModules | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's names and values for one tensor; one pair for each expert.

    Args:
        kept: collects linear layers that keep their bits; None: none do.
    """
    import torch

    from backend.checkpoints.gguf.blocks import KINDS, blocks_linear

    kind = place.kind
    is_linear = kept is not None and len(place.shape) > 1 and kind not in _NOT_LINEAR
    stay = is_linear and tensor.type.name in KINDS
    values = tensor.data if stay else _expanded(tensor, metadata)
    if metadata.is_gemma and kind.endswith("norm"):
        values = values - 1
    if metadata.rotates_neighbours and kind in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
        values = values[_rotate_half_order(np.arange(place.shape[0]), heads)]
    for number, part in enumerate(values if "{}" in place.name else [values]):
        # Not str.format, which would interpret other braces too.
        full_name = place.name.replace("{}", str(number))
        module = full_name.removesuffix(".weight")
        if kept is not None and stay:
            linear = blocks_linear(tensor.type.name, part)
            for scales in (linear.scales, linear.minima):
                if scales is not None:
                    _finite(scales.float().numpy(), tensor, metadata)
            yield from ((f"{module}.{end}", of_module) for end, of_module in kept.parts(module, linear).items())
            continue
        if kept is not None and is_linear:
            kept.left_alone.append(module)
        yield full_name, torch.from_numpy(np.array(part))


def _rotate_half_order(rows: npt.NDArray[np.int64], heads: int) -> npt.NDArray[np.int64]:
    """Undoes llama.cpp's reordering of rotary pairs: it rotates neighbours (2i, 2i+1), Hugging Face (i, i + d/2)."""
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
