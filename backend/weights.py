"""Reads a model directory's safetensors into named, shape-checked tensors. The files stay memory-mapped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.config import ModelConfig
from backend.errors import ModelError
from backend.json_file import read_json_object

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Linear:
    """``y = x · weightᵀ + bias``; weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norm weights are [hidden], per-head norms [head_dim] or None."""

    input_norm: torch.Tensor
    query: Linear
    key: Linear
    value: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    post_attention_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors of one model, in the dtype of the files. ``head`` is ``embedding`` where they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


def read_config(directory: Path) -> ModelConfig:
    """Reads ``config.json``; a ``generation_config.json`` beside it may name more end tokens.

    Raises:
        ModelError: a file cannot be parsed, or asks for something this decoder does not do.
    """
    values = read_json_object(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.is_file() and (eos := read_json_object(generation).get("eos_token_id")) is not None:
        values["eos_token_id"] = eos
    return ModelConfig.from_hf(values, str(directory / "config.json"))


def load_weights(directory: Path, config: ModelConfig) -> ModelWeights:
    """Maps ``*.safetensors`` of a directory and hands out its tensors.

    Raises:
        ModelError: no weights, a missing tensor, or one of the wrong shape; names the tensor.
    """
    store = _TensorStore(directory)
    c = config
    query_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def linear(name: str, rows: int, columns: int, bias: bool) -> Linear:
        return Linear(
            store.take(f"{name}.weight", (rows, columns)), store.take(f"{name}.bias", (rows,)) if bias else None
        )

    def layer(index: int) -> LayerWeights:
        at = f"model.layers.{index}"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        head = (c.head_dim,)
        return LayerWeights(
            input_norm=store.take(f"{at}.input_layernorm.weight", (c.hidden_size,)),
            query=linear(f"{attention}.q_proj", query_size, c.hidden_size, c.qkv_bias),
            key=linear(f"{attention}.k_proj", kv_size, c.hidden_size, c.qkv_bias),
            value=linear(f"{attention}.v_proj", kv_size, c.hidden_size, c.qkv_bias),
            query_norm=store.take(f"{attention}.q_norm.weight", head) if c.qk_norm else None,
            key_norm=store.take(f"{attention}.k_norm.weight", head) if c.qk_norm else None,
            output=linear(f"{attention}.o_proj", c.hidden_size, query_size, c.output_bias),
            post_attention_norm=store.take(f"{at}.post_attention_layernorm.weight", (c.hidden_size,)),
            gate=linear(f"{mlp}.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
            up=linear(f"{mlp}.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
            down=linear(f"{mlp}.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
        )

    embedding = store.take("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(c.num_layers)),
        norm=store.take("model.norm.weight", (c.hidden_size,)),
        head=embedding if c.tie_word_embeddings else store.take("lm_head.weight", (c.vocab_size, c.hidden_size)),
    )


class _TensorStore:
    """Tensors by name over all safetensors files of a directory."""

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._directory = directory
        self._files: dict[str, Any] = {}
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{directory}: no .safetensors file here")
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: not a readable safetensors file ({error})") from error
            names: list[str] = list(file.keys())  # type: ignore[no-untyped-call] # safetensors publishes no types for it
            self._files.update(dict.fromkeys(names, file))

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self._directory}: tensor {name} is missing")
        tensor: torch.Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self._directory}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if not tensor.dtype.is_floating_point:
            raise ModelError(f"{self._directory}: tensor {name} is {tensor.dtype}, expected a float type")
        return tensor
