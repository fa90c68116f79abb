"""Reads a model directory's safetensors into named, shape-checked tensors. The files stay memory-mapped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backend.checkpoints.tensor_store import TensorStore
from backend.model_loader.extra_tensors import refuse_extra_tensors
from backend.models.config import ModelConfig
from backend.models.hf_config import read_hf_config
from backend.models.json_file import read_json_object

if TYPE_CHECKING:
    import torch

    from backend.checkpoints.quantized.registry import CheckpointReader
    from backend.quantized_weights.quantized_linear import QuantizedLinear


@dataclass(frozen=True, slots=True)
class Linear:
    """``y = x · weightᵀ + bias``; weight [out, in], bias [out] or None."""

    weight: torch.Tensor | QuantizedLinear
    bias: torch.Tensor | None

    @property
    def dense(self) -> torch.Tensor:
        """The weight as floats, what its bits say where it is quantised."""
        return dense(self.weight)


@dataclass(frozen=True, slots=True)
class Mlp:
    """``y = down(activation(gate(x)) * up(x))``"""

    gate: Linear
    up: Linear
    down: Linear


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
    """Before the MLP."""
    mlps: tuple[Mlp, ...]
    """One, or one for each expert of a mixture."""
    router: torch.Tensor | None = None
    """[experts, hidden]: scores the experts for a token; None without a mixture."""
    attention_output_norm: torch.Tensor | None = None
    mlp_output_norm: torch.Tensor | None = None

    @property
    def gate(self) -> Linear:
        """Of the first MLP, which is the only one outside a mixture."""
        return self.mlps[0].gate

    @property
    def up(self) -> Linear:
        """Of the first MLP."""
        return self.mlps[0].up

    @property
    def down(self) -> Linear:
        """Of the first MLP."""
        return self.mlps[0].down


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors of one model, in the dtype of the files. ``head`` is ``embedding`` where they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor | QuantizedLinear


def dense(weight: torch.Tensor | QuantizedLinear) -> torch.Tensor:
    """A weight [out, in] as floats."""
    import torch

    return weight if isinstance(weight, torch.Tensor) else weight.unpack()


def read_config(directory: Path) -> ModelConfig:
    """Reads ``config.json``; a ``generation_config.json`` beside it may name more end tokens.

    Raises:
        ModelError: a file cannot be parsed, or asks for something this decoder does not do.
    """
    values = read_json_object(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.is_file() and (eos := read_json_object(generation).get("eos_token_id")) is not None:
        values["eos_token_id"] = eos
    return read_hf_config(values, str(directory / "config.json"))


def load_weights(directory: Path, config: ModelConfig) -> ModelWeights:
    """Maps ``*.safetensors`` of a directory and hands out its tensors, quantised as they are there.

    Raises:
        ModelError: no weights, a missing tensor, one of the wrong shape, one that such a model does not have, or
            weights quantised in a way that is not known; names the tensor.
    """
    from backend.checkpoints.quantized.registry import checkpoint_reader, quantization_config

    store = TensorStore(directory)
    path = directory / "config.json"
    quantization = quantization_config(read_json_object(path))
    reader = None if quantization is None else checkpoint_reader(quantization, store, f"{path}: quantization_config")
    shape = (config.vocab_size, config.hidden_size)
    embedding = store.take("model.embed_tokens.weight", shape)
    tied = config.tie_word_embeddings
    weights = ModelWeights(
        embedding=embedding,
        layers=tuple(_LayerReader(store, reader, config, index).read() for index in range(config.num_layers)),
        norm=_norm(store, "model.norm", config.hidden_size, config.norm_offset),
        head=embedding if tied else _weight(store, reader, "lm_head", *shape),
    )
    refuse_extra_tensors(store, config)
    return weights


def _weight(
    store: TensorStore, reader: CheckpointReader | None, name: str, rows: int, columns: int
) -> torch.Tensor | QuantizedLinear:
    """A module's weight as the files have it: quantised, or plain."""
    packed = None if reader is None else reader.linear(name, rows, columns)
    return store.take(f"{name}.weight", (rows, columns)) if packed is None else packed


class _LayerReader:
    """Takes one layer's tensors out of the files by the names that Hugging Face gives them."""

    def __init__(self, store: TensorStore, reader: CheckpointReader | None, config: ModelConfig, index: int) -> None:
        self._store = store
        self._reader = reader
        self._config = config
        self._index = index
        self._at = f"model.layers.{index}"

    def read(self) -> LayerWeights:
        c = self._config
        attention = f"{self._at}.self_attn"
        query_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        # With norms on the outputs too, the name "post attention" means just that; else it is the norm before the MLP.
        before_mlp = "pre_feedforward_layernorm" if c.output_norms else "post_attention_layernorm"
        router, mlps = self._mlps()
        return LayerWeights(
            input_norm=self._norm("input_layernorm"),
            query=self._linear(f"{attention}.q_proj", query_size, c.hidden_size, c.qkv_bias),
            key=self._linear(f"{attention}.k_proj", kv_size, c.hidden_size, c.qkv_bias),
            value=self._linear(f"{attention}.v_proj", kv_size, c.hidden_size, c.qkv_bias),
            query_norm=self._head_norm(f"{attention}.q_norm"),
            key_norm=self._head_norm(f"{attention}.k_norm"),
            output=self._linear(f"{attention}.o_proj", c.hidden_size, query_size, c.output_bias),
            post_attention_norm=self._norm(before_mlp),
            mlps=mlps,
            router=router,
            attention_output_norm=self._norm("post_attention_layernorm") if c.output_norms else None,
            mlp_output_norm=self._norm("post_feedforward_layernorm") if c.output_norms else None,
        )

    def _mlps(self) -> tuple[torch.Tensor | None, tuple[Mlp, ...]]:
        """The router, if there is one, and the MLPs it chooses from."""
        c, at, parts = self._config, f"{self._at}.mlp", ("gate_proj", "up_proj", "down_proj")
        experts = c.layer_experts(self._index)
        if experts is None:
            return None, (self._mlp(at, parts, c.intermediate_size, c.mlp_bias),)
        if self._store.has(f"{self._at}.block_sparse_moe.gate.weight"):  # Mixtral's names for the same
            at, parts = f"{self._at}.block_sparse_moe", ("w1", "w3", "w2")
        router = self._store.take(f"{at}.gate.weight", (experts.count, c.hidden_size))
        each = (f"{at}.experts.{expert}" for expert in range(experts.count))
        return router, tuple(self._mlp(name, parts, experts.intermediate_size, bias=False) for name in each)

    def _mlp(self, at: str, parts: tuple[str, str, str], size: int, bias: bool) -> Mlp:
        gate, up, down = (f"{at}.{part}" for part in parts)
        hidden = self._config.hidden_size
        return Mlp(
            gate=self._linear(gate, size, hidden, bias),
            up=self._linear(up, size, hidden, bias),
            down=self._linear(down, hidden, size, bias),
        )

    def _linear(self, name: str, rows: int, columns: int, bias: bool) -> Linear:
        weight = _weight(self._store, self._reader, name, rows, columns)
        return Linear(weight, self._store.take(f"{name}.bias", (rows,)) if bias else None)

    def _norm(self, name: str) -> torch.Tensor:
        return _norm(self._store, f"{self._at}.{name}", self._config.hidden_size, self._config.norm_offset)

    def _head_norm(self, name: str) -> torch.Tensor | None:
        c = self._config
        return _norm(self._store, name, c.head_dim, c.norm_offset) if c.qk_norm else None


def _norm(store: TensorStore, name: str, size: int, offset: float) -> torch.Tensor:
    """A norm's weight [size] with the family's offset added, in float32 where there is one to add."""
    weight = store.take(f"{name}.weight", (size,))
    return weight.float() + offset if offset else weight
