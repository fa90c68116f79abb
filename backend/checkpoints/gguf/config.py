"""Converts a GGUF file's metadata to a Hugging Face ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.checkpoints.gguf.header import shown
from backend.errors import ModelError
from backend.models.config import Llama3RopeScaling
from backend.models.hf_config import ATTENTION_BIAS_FIELD

# GGUF's architectures, with Hugging Face's model type and class.
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_MIXTRAL = ("mixtral", "MixtralForCausalLM")

# Gemma 2 and 3 of 27 billion parameters scale attention by hidden size / heads, all others by the size of a head.
# GGUF does not store which, so the number of layers decides, as in llama.cpp.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

# Of all Llama 3.1 to 3.3 models; GGUF stores only the resulting divisor of each frequency.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192

# Model types whose config has a field for biases of the MLP.
_MLP_BIAS_FIELD = ("llama", "smollm3")

_MAX = 2**31 - 1
"""Limit of counts; far more than any model has."""


class GgufMetadata:
    """The metadata fields of one file.

    Args:
        fields: by GGUF's names.
        tensors: names of all tensors.
        source: the file, for error messages.

    Raises:
        ModelError: an architecture that is not supported.
    """

    def __init__(self, fields: Mapping[str, Any], tensors: Collection[str], source: str) -> None:
        self.fields = fields
        self.tensors = tensors
        self.source = source
        architecture = fields.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            raise self.error("general.architecture", f"one of {', '.join(_ARCHITECTURES)}")
        if fields.get("split.count", 1) not in (0, 1):
            raise self.error("split.count", "1: the whole model in one file, as llama-gguf-split --merge makes it")
        self.architecture = architecture

    def error(self, key: str, expected: str) -> ModelError:
        """The error for an invalid field."""
        if key not in self.fields:
            return ModelError(f"{self.source}: metadata {key} is missing, expected {expected}")
        return ModelError(f"{self.source}: metadata {key} is {shown(self.fields[key])}, expected {expected}")

    def key(self, name: str) -> str:
        """The key of a field of the architecture, such as ``block_count``."""
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Whether there is such a field of the architecture."""
        return self.key(name) in self.fields

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            ModelError: the field is invalid, or missing without a default. So in the methods below.
        """
        value = self.fields.get(self.key(name), default)
        if not _is_whole(value) or not 0 < value <= _MAX:
            raise self.error(self.key(name), f"a whole number from 1 to {_MAX}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.fields.get(self.key(name), default)
        if not (_is_whole(value) or isinstance(value, float)) or not 0 < value < math.inf:
            raise self.error(self.key(name), "a positive number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """A string, by the whole key."""
        value = self.fields.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    @property
    def experts(self) -> int:
        """Experts of a layer; 0 if it has one ordinary MLP."""
        key = self.key("expert_count")
        return 0 if self.fields.get(key) == 0 or key not in self.fields else self.count("expert_count")

    @cached_property
    def vocabulary(self) -> list[str]:
        """The tokens in the order of their ids."""
        key = "tokenizer.ggml.tokens"
        tokens = self.fields.get(key)
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise self.error(key, "a list of strings")
        return tokens

    def token_id(self, name: str) -> int | None:
        """A field of the tokenizer that names a token, such as ``bos_token_id``; None where it is missing."""
        key, most = f"tokenizer.ggml.{name}", len(self.vocabulary) - 1
        if (value := self.fields.get(key)) is None:
            return None
        if not _is_whole(value) or not 0 <= value <= most:
            raise self.error(key, f"a token id from 0 to {most}")
        return int(value)

    @property
    def is_gemma(self) -> bool:
        """Whether norm weights include the 1 that Hugging Face adds at run time, and outputs are normed too."""
        return self.architecture.startswith("gemma")

    @property
    def is_mixtral(self) -> bool:
        """GGUF stores Mixtral as llama, distinguished by its experts."""
        return self.architecture == "llama" and self.experts > 0

    @property
    def rotates_neighbours(self) -> bool:
        """Whether rows of queries and keys are ordered to rotate elements 2i and 2i + 1 together."""
        return self.architecture in ("llama", "smollm3")


def hf_config(metadata: GgufMetadata, rope_divisors: npt.NDArray[np.float32] | None) -> dict[str, Any]:
    """The contents of ``config.json``.

    Args:
        rope_divisors: the tensor ``rope_freqs``, if there is one.

    Raises:
        ModelError: a field is missing, invalid or not supported.
    """
    model_type, class_name = _MIXTRAL if metadata.is_mixtral else _ARCHITECTURES[metadata.architecture]
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    kv_heads = metadata.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise metadata.error(metadata.key("attention.head_count_kv"), f"a divisor of the {heads} heads of queries")
    head_dim = metadata.count("attention.key_length", hidden // heads)
    layers = metadata.count("block_count")
    if layers > len(metadata.tensors):  # before allocations for each layer
        raise metadata.error(
            metadata.key("block_count"), f"fewer layers than there are tensors, {len(metadata.tensors)}"
        )
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": _short_float(metadata.number("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": metadata.number("rope.freq_base", 1e6 if metadata.architecture == "gemma3" else 10000.0),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "vocab_size": len(metadata.vocabulary),
        "bos_token_id": metadata.token_id("bos_token_id"),
        "eos_token_id": _end_tokens(metadata),
        **_biases(metadata, model_type),
    }
    if scaling := _rope_scaling(metadata, config["rope_theta"], head_dim, rope_divisors):
        config["rope_scaling"] = scaling
    if metadata.is_gemma:
        config |= _gemma(metadata, hidden // heads, head_dim)
    if metadata.experts or model_type == "qwen3_moe":
        config |= _experts(metadata)
    return config


def _biases(metadata: GgufMetadata, model_type: str) -> dict[str, bool]:
    """Whether layers have biases, by the names of the tensors: GGUF has no metadata for it."""
    parts = [name.split(".") for name in metadata.tensors]
    kinds = {kind for block, _, kind, end in (of for of in parts if len(of) == 4) if (block, end) == ("blk", "bias")}
    fields = {}
    if model_type in ATTENTION_BIAS_FIELD:
        fields["attention_bias"] = not kinds.isdisjoint(("attn_q", "attn_k", "attn_v", "attn_output"))
    if model_type in _MLP_BIAS_FIELD:
        fields["mlp_bias"] = not kinds.isdisjoint(("ffn_gate", "ffn_up", "ffn_down"))
    return fields


def _end_tokens(metadata: GgufMetadata) -> int | list[int] | None:
    """Tokens that end a text or a turn of a chat."""
    named = (metadata.token_id(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
    ids = list(dict.fromkeys(token for token in named if token is not None))
    return ids[0] if len(ids) == 1 else ids or None


def _gemma(metadata: GgufMetadata, share: int, head_dim: int) -> dict[str, Any]:
    large = metadata.count("block_count") == _GEMMA_27B_LAYERS[metadata.architecture]
    gemma3 = metadata.architecture == "gemma3"
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": share if large else head_dim,
        "sliding_window": metadata.count("attention.sliding_window", 1024 if gemma3 else 4096),
        "attn_logit_softcapping": _cap(metadata, "attn_logit_softcapping", None if gemma3 else 50.0),
        "final_logit_softcapping": _cap(metadata, "final_logit_softcapping", None if gemma3 else 30.0),
        **({"rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0)} if gemma3 else {}),
    }


def _cap(metadata: GgufMetadata, name: str, default: float | None) -> float | None:
    return metadata.number(name) if metadata.has(name) else default


def _experts(metadata: GgufMetadata) -> dict[str, Any]:
    count, used = metadata.count("expert_count"), metadata.count("expert_used_count")
    if used > count:
        raise metadata.error(metadata.key("expert_used_count"), f"at most the {count} that there are")
    if metadata.architecture == "qwen3moe":
        size = metadata.count("expert_feed_forward_length")
        # llama.cpp always scales the chosen experts of this architecture to a sum of 1.
        return {
            "num_experts_per_tok": used,
            "num_experts": count,
            "moe_intermediate_size": size,
            "norm_topk_prob": True,
        }
    return {"num_experts_per_tok": used, "num_local_experts": count}


def _rope_scaling(
    metadata: GgufMetadata, theta: float, head_dim: int, divisors: npt.NDArray[np.float32] | None
) -> dict[str, Any] | None:
    if metadata.count("rope.dimension_count", head_dim) != head_dim:
        raise metadata.error(metadata.key("rope.dimension_count"), f"the size of a head, {head_dim}")
    if divisors is not None:
        return _llama3_scaling(metadata, theta, head_dim, divisors)
    key = metadata.key("rope.scaling.type")
    kind = metadata.text(key, "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _short_float(metadata.number("rope.scaling.factor"))}
    if kind != "none":
        raise metadata.error(key, "'none' or 'linear'")
    return None


def _llama3_scaling(
    metadata: GgufMetadata, theta: float, head_dim: int, divisors: npt.NDArray[np.float32]
) -> dict[str, Any]:
    """Llama 3.1's scaling with these divisors, checked by recomputing them."""
    import torch

    from backend.models.rope import scaled_frequencies

    factor = _short_float(float(divisors.max()))
    scaling = Llama3RopeScaling(factor, _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT)

    def explained() -> bool:
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        expected = (frequencies / scaled_frequencies(scaling, frequencies)).numpy()
        return np.allclose(divisors, expected, rtol=1e-3)

    # Nothing is allocated before the shape is checked.
    if divisors.shape != (-(-head_dim // 2),) or not divisors.min() > 0 or not explained():
        raise ModelError(
            f"{metadata.source}: tensor rope_freqs.weight does not scale frequencies as Llama 3.1 does; "
            "use the model's safetensors directory"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _short_float(value: float) -> float:
    """GGUF stores 1e-5 as a float32; returns the original decimal."""
    return float(f"{value:.6g}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
