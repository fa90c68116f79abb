"""Small model directories, and linear layers read from them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from backend.checkpoints.quantized.registry import checkpoint_reader, quantization_config
from backend.checkpoints.tensor_store import TensorStore
from backend.models.json_file import read_json_object
from backend.quantized_weights.quantized_linear import QuantizedLinear

NAME = "model.layers.0.self_attn.q_proj"
NORM = "model.layers.0.input_layernorm.weight"


def write_source(directory: Path, weights: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """A directory with linear layers, an embedding, a norm, a tokenizer and the other files that are copied."""
    directory.mkdir(parents=True)
    tensors = {f"{name}.weight": weight for name, weight in weights.items()}
    plain = {"model.embed_tokens.weight": torch.ones(8, 4), NORM: torch.arange(4.0)}
    save_file({**plain, **tensors}, directory / "model.safetensors")
    values = {"model_type": "llama", "dtype": "float32", **config}
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    (directory / "tokenizer.json").write_text('{"a": "tokenizer"}', encoding="utf-8")
    (directory / "generation_config.json").write_text('{"eos_token_id": 3}', encoding="utf-8")
    return directory


def read_linear(directory: Path, name: str, out_features: int, in_features: int) -> QuantizedLinear | None:
    """One layer, read as the backend reads it."""
    path = directory / "config.json"
    values = quantization_config(read_json_object(path))
    assert values is not None
    return checkpoint_reader(values, TensorStore(directory), str(path)).linear(name, out_features, in_features)


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors of `NAME` by the end of their names ("__" for a point), or takes them out."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for part, tensor in changes.items():
        name = f"{NAME}.{part.replace('__', '.')}"
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


def change_config(directory: Path, **changes: Any) -> None:
    """Changes fields of ``quantization_config``."""
    path = directory / "config.json"
    values = read_json_object(path)
    values["quantization_config"] |= changes
    path.write_text(json.dumps(values), encoding="utf-8")


def kept(linear: Any) -> dict[str, Any]:
    """All fields of a weight or its scales, with tensors as lists, so that two weights can be compared."""
    fields = {field.name: getattr(linear, field.name) for field in dataclasses.fields(linear)}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            fields[name] = (value.dtype, tuple(value.shape), value.contiguous().view(torch.uint8).flatten().tolist())
        elif name == "scales":
            fields[name] = kept(value)
    return fields
