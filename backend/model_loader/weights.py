"""Reads a model directory's safetensors into named, shape-checked tensors. The files stay memory-mapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backend.checkpoints.tensor_store import TensorStore
from backend.model_loader.extra_tensors import refuse_extra_tensors
from backend.models.config import ModelConfig
from backend.models.generation_config import GENERATION_CONFIG
from backend.models.hf_config import read_hf_config
from backend.models.json_file import read_json_object
from backend.models.partition import ModelPart, common_units, partition

if TYPE_CHECKING:
    import torch

    from backend.checkpoints.quantized.registry import CheckpointReader
    from backend.quantized_weights.quantized_linear import QuantizedLinear, Scheme


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
class PartialOutputs(Linear):
    """Some outputs of a layer whose other parts have the other ones. Each part has computed some of the inputs.

    It takes the place of a part of the inputs where a weight cannot be divided along them.
    """

    outputs: range
    num_outputs: int
    """Of all parts."""
    inputs: range
    """Those that this part has computed, of the inputs of the weight."""


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
    generation = directory / GENERATION_CONFIG
    if generation.is_file() and (eos := read_json_object(generation).get("eos_token_id")) is not None:
        values["eos_token_id"] = eos
    return read_hf_config(values, str(directory / "config.json"))


SchemeOf = Callable[[str, int, int], "Scheme | None"]
"""What a layer, by name, outputs and inputs, is rounded to; None: it stays as it is."""


def load_weights(
    directory: Path, config: ModelConfig, part: ModelPart | None = None, scheme_of: SchemeOf | None = None
) -> ModelWeights:
    """Maps ``*.safetensors`` of a directory and hands out its tensors, quantised as they are there.

    Args:
        part: what of the model is wanted, read by slices where the files hold floats; None: all of it. A quantised
            weight is divided after it was read, one at a time. Biases that are added to a sum over all parts are in
            the first one alone; the embedding and the head have no rows in stages that do not use them.
        scheme_of: of the linear layers and the head that the files hold as floats; None: they stay as they are. A
            weight that is divided along its inputs is read and rounded whole, one at a time, and then divided: so its
            scales are those of the whole.

    Raises:
        CannotQuantize: a weight does not fit its scheme; names it.
        ModelError: no weights, a missing tensor, one of the wrong shape, one that such a model does not have, or
            weights quantised in a way that is not known; names the tensor.
    """
    from backend.checkpoints.quantized.registry import checkpoint_reader, quantization_config

    store = TensorStore(directory)
    path = directory / "config.json"
    quantization = quantization_config(read_json_object(path))
    reader = None if quantization is None else checkpoint_reader(quantization, store, f"{path}: quantization_config")
    linears = _LinearReader(store, reader, scheme_of)
    part = part or partition(config, 1, 1)[0]
    tied, shape = config.tie_word_embeddings, (config.vocab_size, config.hidden_size)
    no_rows = range(0)
    embedded = part.vocabulary if part.is_first or (part.is_last and tied) else no_rows
    embedding = store.take("model.embed_tokens.weight", shape, _rows(embedded, config.vocab_size))
    head: torch.Tensor | QuantizedLinear = embedding
    if not part.is_last:
        head = embedding[:0]
    elif not tied:
        head = linears.outputs("lm_head", *shape, part.vocabulary)
    elif (scheme := linears.scheme("lm_head", *shape)) is not None:
        head = _packed("lm_head", scheme, embedding)
    weights = ModelWeights(
        embedding=embedding,
        layers=tuple(_LayerReader(store, linears, config, part, index).read() for index in part.layers),
        norm=_norm(store, "model.norm", config.hidden_size, config.norm_offset),
        head=head,
    )
    refuse_extra_tensors(store, config, part)
    return weights


def _rows(wanted: range, count: int) -> range | None:
    """None for all, which are mapped and not copied."""
    return None if len(wanted) == count else wanted


class _LinearReader:
    """Takes parts of linear layers out of the files."""

    def __init__(self, store: TensorStore, reader: CheckpointReader | None, scheme_of: SchemeOf | None) -> None:
        self._store = store
        self._reader = reader
        self._scheme_of = scheme_of

    def scheme(self, name: str, rows: int, columns: int) -> Scheme | None:
        """What floats [rows, columns] are rounded to."""
        return None if self._scheme_of is None else self._scheme_of(name, rows, columns)

    def outputs(self, name: str, rows: int, columns: int, wanted: range) -> torch.Tensor | QuantizedLinear:
        """The wanted rows of a weight [rows, columns]."""
        from backend.quantized_weights.slices import rounds_outputs_alone, some_outputs

        packed, scheme = self._quantised(name, rows, columns), self.scheme(name, rows, columns)
        if packed is None and scheme is not None and not rounds_outputs_alone(scheme):
            packed = _packed(name, scheme, self._store.take(f"{name}.weight", (rows, columns)))
        if packed is not None:
            return packed if len(wanted) == rows else some_outputs(packed, wanted)
        own = self._store.take(f"{name}.weight", (rows, columns), _rows(wanted, rows))
        return own if scheme is None else _packed(name, scheme, own)

    def inputs(
        self, name: str, rows: int, columns: int, wanted: range, unit: int
    ) -> torch.Tensor | QuantizedLinear | None:
        """The wanted columns of a weight [rows, columns]; None: it cannot be divided along them.

        Args:
            unit: of all parts, see `some_inputs`.
        """
        from backend.quantized_weights.slices import some_inputs

        packed, scheme = self._quantised(name, rows, columns), self.scheme(name, rows, columns)
        if packed is None and scheme is not None:
            packed = _packed(name, scheme, self._store.take(f"{name}.weight", (rows, columns)))
        if packed is None:
            return self._store.take(f"{name}.weight", (rows, columns), None, _rows(wanted, columns))
        return packed if len(wanted) == columns else some_inputs(packed, wanted, unit)

    def _quantised(self, name: str, rows: int, columns: int) -> QuantizedLinear | None:
        """The whole weight as the files have it; None: they have it as floats."""
        return None if self._reader is None else self._reader.linear(name, rows, columns)


def _packed(name: str, scheme: Scheme, weight: torch.Tensor) -> QuantizedLinear:
    from backend.quantized_weights.quantized_linear import CannotQuantize

    try:
        return scheme.pack(weight)
    except CannotQuantize as refusal:
        raise CannotQuantize(f"{name}: {refusal}") from refusal


class _LayerReader:
    """Takes one layer's tensors out of the files by the names that Hugging Face gives them."""

    def __init__(
        self, store: TensorStore, linears: _LinearReader, config: ModelConfig, part: ModelPart, index: int
    ) -> None:
        self._store = store
        self._linears = linears
        self._config = config
        self._part = part
        self._units = common_units(config, part.tensor_ranks)
        self._index = index
        self._at = f"model.layers.{index}"

    def read(self) -> LayerWeights:
        c = self._config
        attention = f"{self._at}.self_attn"
        query, kv = (_features(heads, c.head_dim) for heads in (self._part.heads, self._part.kv_heads))
        query_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        # With norms on the outputs too, the name "post attention" means just that; else it is the norm before the MLP.
        before_mlp = "pre_feedforward_layernorm" if c.output_norms else "post_attention_layernorm"
        router, mlps = self._mlps()
        return LayerWeights(
            input_norm=self._norm("input_layernorm"),
            query=self._outputs(f"{attention}.q_proj", query_size, query, c.qkv_bias),
            key=self._outputs(f"{attention}.k_proj", kv_size, kv, c.qkv_bias),
            value=self._outputs(f"{attention}.v_proj", kv_size, kv, c.qkv_bias),
            query_norm=self._head_norm(f"{attention}.q_norm"),
            key_norm=self._head_norm(f"{attention}.k_norm"),
            output=self._inputs(f"{attention}.o_proj", query_size, query, self._units.heads, c.output_bias),
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
            own, unit = self._part.intermediate, self._units.intermediate
            return None, (self._mlp(at, parts, c.intermediate_size, own, unit, c.mlp_bias),)
        if self._store.has(f"{self._at}.block_sparse_moe.gate.weight"):  # Mixtral's names for the same
            at, parts = f"{self._at}.block_sparse_moe", ("w1", "w3", "w2")
        router = self._store.take(f"{at}.gate.weight", (experts.count, c.hidden_size))
        each = (f"{at}.experts.{expert}" for expert in range(experts.count))
        own, unit = self._part.expert_intermediate, self._units.expert_intermediate
        return router, tuple(self._mlp(name, parts, experts.intermediate_size, own, unit, bias=False) for name in each)

    def _mlp(self, at: str, parts: tuple[str, str, str], size: int, own: range, unit: int, bias: bool) -> Mlp:
        gate, up, down = (f"{at}.{part}" for part in parts)
        return Mlp(
            gate=self._outputs(gate, size, own, bias),
            up=self._outputs(up, size, own, bias),
            down=self._inputs(down, size, own, unit, bias),
        )

    def _outputs(self, name: str, size: int, own: range, bias: bool) -> Linear:
        """A layer from hidden states to ``size`` outputs, of which the part has some."""
        weight = self._linears.outputs(name, size, self._config.hidden_size, own)
        return Linear(weight, self._bias(name, size, own) if bias else None)

    def _inputs(self, name: str, size: int, own: range, unit: int, bias: bool) -> Linear:
        """A layer from ``size`` inputs, of which the part has some, to hidden states."""
        hidden, part = self._config.hidden_size, self._part
        weight = self._linears.inputs(name, hidden, size, own, unit)
        if weight is not None:
            whole = self._bias(name, hidden, range(hidden)) if bias else None
            return Linear(weight, None if part.tensor_rank else whole)
        rank, ranks = part.tensor_rank, part.tensor_ranks
        outputs = range(hidden * rank // ranks, hidden * (rank + 1) // ranks)
        return PartialOutputs(
            self._linears.outputs(name, hidden, size, outputs),
            self._bias(name, hidden, outputs) if bias else None,
            outputs,
            hidden,
            own,
        )

    def _bias(self, name: str, size: int, own: range) -> torch.Tensor:
        return self._store.take(f"{name}.bias", (size,), _rows(own, size))

    def _norm(self, name: str) -> torch.Tensor:
        return _norm(self._store, f"{self._at}.{name}", self._config.hidden_size, self._config.norm_offset)

    def _head_norm(self, name: str) -> torch.Tensor | None:
        c = self._config
        return _norm(self._store, name, c.head_dim, c.norm_offset) if c.qk_norm else None


def _features(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _norm(store: TensorStore, name: str, size: int, offset: float) -> torch.Tensor:
    """A norm's weight [size] with the family's offset added, in float32 where there is one to add."""
    weight = store.take(f"{name}.weight", (size,))
    return weight.float() + offset if offset else weight
