"""The tensors of a decoder in a GGUF file: their names, shapes and names in Hugging Face's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend.checkpoints.gguf.config import GgufMetadata
from backend.checkpoints.gguf.header import GgufTensor, shown
from backend.errors import ModelError
from backend.models.config import Experts, ModelConfig

Shape = tuple[int, ...]
Modules = dict[str, tuple[str, Shape]]
"""Of a layer, by GGUF name: Hugging Face name and the shape of the weight."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes."""

    kind: str
    """GGUF's name of the module, such as attn_q, without its layer."""
    name: str
    """In Hugging Face's files. All experts of a layer are one tensor in GGUF; "{}" stands for an expert's number."""
    shape: Shape


def tensor_places(config: ModelConfig) -> dict[str, Place]:
    """All tensors of a decoder, by their names in GGUF."""
    matrix = (config.vocab_size, config.hidden_size)
    places = {
        "token_embd.weight": Place("token_embd", "model.embed_tokens.weight", matrix),
        "output_norm.weight": Place("output_norm", "model.norm.weight", (config.hidden_size,)),
    }
    if not config.tie_word_embeddings:
        places["output.weight"] = Place("output", "lm_head.weight", matrix)
    modules, biased = _modules(config), _biased(config)
    for layer in range(config.num_layers):
        for kind, (module, shape) in modules.items():
            name = f"model.layers.{layer}.{module}"
            places[f"blk.{layer}.{kind}.weight"] = Place(kind, f"{name}.weight", shape)
            if kind in biased:
                places[f"blk.{layer}.{kind}.bias"] = Place(kind, f"{name}.bias", shape[:1])
    return places


def check_tensors(tensors: Sequence[GgufTensor], places: Mapping[str, Place], metadata: GgufMetadata) -> None:
    """Raises ModelError for the first tensor that has no place, has another shape, or is missing; names it."""
    layers = metadata.count("block_count")
    for tensor in tensors:
        place = places.get(tensor.name)
        if place is None:
            raise ModelError(
                f"{metadata.source}: tensor {shown(tensor.name)} has no place in a {metadata.architecture} decoder "
                f"of {layers} layers"
            )
        if tensor.shape != place.shape:
            raise ModelError(
                f"{metadata.source}: tensor {shown(tensor.name)} has shape {list(tensor.shape)}, "
                f"expected {list(place.shape)}"
            )
    found = {tensor.name for tensor in tensors}
    if missing := next((name for name in places if name not in found), None):
        raise ModelError(f"{metadata.source}: tensor {missing!r} is missing")


def _modules(config: ModelConfig) -> Modules:
    hidden = config.hidden_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    modules: Modules = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (query, hidden)),
        "attn_k": ("self_attn.k_proj", (kv, hidden)),
        "attn_v": ("self_attn.v_proj", (kv, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, query)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
    }
    if config.qk_norm:
        modules["attn_q_norm"] = ("self_attn.q_norm", (config.head_dim,))
        modules["attn_k_norm"] = ("self_attn.k_norm", (config.head_dim,))
    if config.output_norms:
        modules["post_attention_norm"] = ("post_attention_layernorm", (hidden,))
        modules["ffn_norm"] = ("pre_feedforward_layernorm", (hidden,))
        modules["post_ffw_norm"] = ("post_feedforward_layernorm", (hidden,))
    if config.experts is not None:
        return modules | _expert_modules(config.experts, hidden, config.model_type == "mixtral")
    return modules | {
        "ffn_gate": ("mlp.gate_proj", (config.intermediate_size, hidden)),
        "ffn_up": ("mlp.up_proj", (config.intermediate_size, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, config.intermediate_size)),
    }


def _expert_modules(experts: Experts, hidden: int, mixtral: bool) -> Modules:
    at, gate, up, down = (
        ("block_sparse_moe", "w1", "w3", "w2") if mixtral else ("mlp", "gate_proj", "up_proj", "down_proj")
    )
    count, size = experts.count, experts.intermediate_size
    return {
        "ffn_gate_inp": (f"{at}.gate", (count, hidden)),
        "ffn_gate_exps": (f"{at}.experts.{{}}.{gate}", (count, size, hidden)),
        "ffn_up_exps": (f"{at}.experts.{{}}.{up}", (count, size, hidden)),
        "ffn_down_exps": (f"{at}.experts.{{}}.{down}", (count, hidden, size)),
    }


def _biased(config: ModelConfig) -> set[str]:
    return {
        *(("attn_q", "attn_k", "attn_v") if config.qkv_bias else ()),
        *(("attn_output",) if config.output_bias else ()),
        *(("ffn_gate", "ffn_up", "ffn_down") if config.mlp_bias else ()),
    }
