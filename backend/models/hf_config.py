"""Reads a Hugging Face ``config.json`` into a ``ModelConfig``, with what each family leaves out or spells its way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.models.config import (
    Activation,
    Experts,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
    Rope,
    RopeScaling,
)
from backend.models.json_fields import MAX_LAYERS, MAX_TOKENS, Fields

_GEMMA: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "use_sliding_window": True,
}
# Values that a family's files may leave out, where they differ from Llama's.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096, "use_sliding_window": True},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "use_sliding_window": True},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3_moe": {"sliding_window": 4096, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "smollm3": {"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        **_GEMMA,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        # The text part of a model that also sees may say little more than its size.
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
_GEMMA3_MULTIMODAL = "gemma3"
"""Gemma 3 of 4 billion parameters and more: its text part is a ``gemma3_text``, and all that is served of it."""
SUPPORTED_MODEL_TYPES = (*_DEFAULTS, _GEMMA3_MULTIMODAL)

_QWEN_WINDOWS = ("qwen2", "qwen3")
ATTENTION_BIAS_FIELD = ("llama", "qwen3", "qwen3_moe", "smollm3", "gemma2", "gemma3_text")
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MAX_EXPERTS = 2**16
"""Of a layer, each of which is looked for by name; the most that there are is some hundreds."""
_MAX_POSITIONS = 2**22
"""What the longest contexts of these families have; a table has a row for each."""
_MAX_HEAD_DIM = 2**14
"""Heads have some hundreds."""
_MAX_ROPE_ELEMENTS = 2**30
"""Of a table with as many numbers for each position as a head has."""


def read_hf_config(values: Mapping[str, Any], source: str) -> ModelConfig:
    """Reads the contents of a Hugging Face ``config.json``.

    Args:
        values: the parsed file.
        source: name of the file, for error messages.

    Raises:
        ModelError: a field is missing, wrong, or asks for something this decoder does not do.
    """
    model_type = Fields(values, source).text("model_type")
    if model_type == _GEMMA3_MULTIMODAL:
        return read_hf_config(_text_part(Fields(values, source)), f"{source}: text_config")
    if model_type not in _DEFAULTS:
        raise Fields(values, source).error("model_type", f"one of {', '.join(SUPPORTED_MODEL_TYPES)}")
    fields = Fields({**_DEFAULTS[model_type], **values}, source)
    gemma = model_type.startswith("gemma")
    if fields.values.get("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "false: an answer is written from left to right")
    hidden_size = fields.count("hidden_size")
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    head_dim = fields.count("head_dim", hidden_size // num_heads, most=_MAX_HEAD_DIM)
    if not 1 <= head_dim <= _MAX_HEAD_DIM:
        raise fields.error("hidden_size", f"num_attention_heads ({num_heads}) times 1 to {_MAX_HEAD_DIM}")
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    vocab_size = fields.count("vocab_size", most=MAX_TOKENS)
    positions = fields.count("max_position_embeddings", most=_MAX_POSITIONS)
    if positions < 2:
        raise fields.error("max_position_embeddings", "at least 2: a token and its answer")
    if positions * head_dim > _MAX_ROPE_ELEMENTS:
        raise fields.error(
            "max_position_embeddings", f"at most {_MAX_ROPE_ELEMENTS // head_dim} for head_dim {head_dim}"
        )
    attention_bias = model_type in ATTENTION_BIAS_FIELD and fields.flag("attention_bias")
    main_rope, ropes = _ropes(fields, model_type, num_layers)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=main_rope.theta,
        rope_scaling=main_rope.scaling,
        max_position_embeddings=positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=model_type in ("llama", "smollm3") and fields.flag("mlp_bias"),
        qk_norm=model_type in ("qwen3", "qwen3_moe", "gemma3_text"),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        activation=_activation(fields, "hidden_activation" if gemma else "hidden_act"),
        windows=_windows(fields, model_type, num_layers),
        ropes=ropes,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5 if gemma else None,
        attention_softcap=fields.optional_number("attn_logit_softcapping") if gemma else None,
        logit_softcap=fields.optional_number("final_logit_softcapping") if gemma else None,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        norm_offset=1.0 if gemma else 0.0,
        output_norms=gemma,
        experts=_experts(fields, model_type, num_layers),
    )


def _text_part(fields: Fields) -> Mapping[str, Any]:
    """The object that describes the decoder; the end tokens beside it are the decoder's too."""
    text = fields.values.get("text_config")
    if not isinstance(text, Mapping):
        raise fields.error("text_config", "an object")
    if text.get("model_type") == _GEMMA3_MULTIMODAL:
        raise Fields(text, f"{fields.source}: text_config").error("model_type", "'gemma3_text'")
    ends = fields.values.get("eos_token_id")
    return {"model_type": "gemma3_text", **text, **({} if ends is None else {"eos_token_id": ends})}


def _activation(fields: Fields, field: str) -> Activation:
    name = fields.values.get(field)
    if name is None:
        return "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise fields.error(field, " or ".join(map(repr, _ACTIVATIONS)))
    return _ACTIVATIONS[name]


def _windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    if model_type == "llama" or not fields.flag("use_sliding_window") or fields.values.get("sliding_window") is None:
        return ()
    window = fields.count("sliding_window")
    slides = _sliding_layers(fields, model_type, num_layers)
    return tuple(window if sliding else None for sliding in slides) if any(slides) else ()


def _sliding_layers(fields: Fields, model_type: str, num_layers: int) -> list[bool]:
    """For each layer, whether it is the windowed kind: as ``layer_types`` says, else by the family's older rule."""
    layers = range(num_layers)
    if model_type in ("mistral", "mixtral", "qwen3_moe"):
        return [True] * num_layers
    types = fields.per_layer("layer_types", num_layers, (_SLIDING, _FULL))
    if types is not None:
        return [kind == _SLIDING for kind in types]
    if model_type in _QWEN_WINDOWS:
        first = fields.values.get("max_window_layers")
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise fields.error("max_window_layers", "a number of layers")
        return [layer >= first for layer in layers]
    if model_type == "smollm3":
        return [not rotates for rotates in _rotating_layers(fields, num_layers)]
    pattern = fields.count("sliding_window_pattern", 2)
    return [bool((layer + 1) % pattern) for layer in layers]


def _rotating_layers(fields: Fields, num_layers: int) -> list[bool]:
    """SmolLM3: ``no_rope_layers`` holds 1 where a layer *has* rotary embeddings."""
    listed = fields.per_layer("no_rope_layers", num_layers, (0, 1))
    interval = fields.count("no_rope_layer_interval")
    return [bool(item) for item in listed] if listed else [bool((i + 1) % interval) for i in range(num_layers)]


def _ropes(fields: Fields, model_type: str, num_layers: int) -> tuple[Rope, tuple[Rope | None, ...]]:
    """The model's main rotary embedding, and one for each layer where they are not all that one."""
    if model_type == "gemma3_text":
        everywhere, local = _gemma3_ropes(fields)
        slides = _sliding_layers(fields, model_type, num_layers)
        ropes: tuple[Rope | None, ...] = tuple(local if sliding else everywhere for sliding in slides)
    else:
        everywhere = _rope(fields)
        ropes = ()
        if model_type == "smollm3":
            ropes = tuple(everywhere if rotates else None for rotates in _rotating_layers(fields, num_layers))
    return everywhere, () if all(rope == everywhere for rope in ropes) else ropes


def _gemma3_ropes(fields: Fields) -> tuple[Rope, Rope]:
    """Of full and of windowed layers. Newer files have an object for each kind under ``rope_parameters``."""
    kinds = fields.values.get("rope_parameters")
    if isinstance(kinds, Mapping) and (_FULL in kinds or _SLIDING in kinds):
        # An older rope_scaling beside the newer spelling is of the full layers, and says more.
        scaling = fields.values.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise fields.error("rope_scaling", "an object")
        of_full = {**(kinds.get(_FULL) or {}), **scaling}
        full = {**fields.values, "rope_parameters": of_full, "rope_scaling": None}
        local = {"rope_theta": fields.values["rope_local_base_freq"], "rope_parameters": kinds.get(_SLIDING)}
        return _rope(Fields(full, fields.source)), _rope(Fields(local, fields.source))
    return _rope(fields), Rope(fields.number("rope_local_base_freq", 1e4))


def _rope(fields: Fields) -> Rope:
    """Base and scaling, from either spelling: ``rope_parameters``, or ``rope_theta`` + ``rope_scaling``, which wins."""
    field = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    values = fields.values.get(field) or {}
    if not isinstance(values, Mapping):
        raise fields.error(field, "an object")
    rope = Fields(values, f"{fields.source}: {field}")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = values.get("partial_rotary_factor", fields.values.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise fields.error("partial_rotary_factor", "1.0")
    return Rope(theta, _rope_scaling(rope))


def _rope_scaling(rope: Fields) -> RopeScaling | None:
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(rope.number("factor", 1.0))
    if kind != "llama3":
        raise rope.error("rope_type", "'default', 'linear' or 'llama3'")
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if low >= high:
        raise rope.error("low_freq_factor", f"less than high_freq_factor ({high})")
    return Llama3RopeScaling(
        factor=rope.number("factor", 8.0),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.count("original_max_position_embeddings"),
    )


def _experts(fields: Fields, model_type: str, num_layers: int) -> Experts | None:
    if model_type not in ("mixtral", "qwen3_moe"):
        return None
    count_field = "num_experts" if "num_experts" in fields.values else "num_local_experts"
    count = fields.count(count_field, 128 if model_type == "qwen3_moe" else None, most=_MAX_EXPERTS)
    per_token = fields.count("num_experts_per_tok", 2)
    if per_token > count:
        raise fields.error("num_experts_per_tok", f"at most {count_field} ({count})")
    if model_type == "mixtral":
        return Experts(count, per_token, fields.count("intermediate_size"), normalise=True)
    step = fields.count("decoder_sparse_step", 1)
    listed = fields.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise fields.error("mlp_only_layers", "a list of layers")
    named = set(listed)
    dense = {layer for layer in range(num_layers) if layer in named or (layer + 1) % step}
    return Experts(
        count,
        per_token,
        fields.count("moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob"),
        dense_layers=frozenset(dense),
    )
