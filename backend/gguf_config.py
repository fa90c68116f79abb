"""What a GGUF file's metadata says about the model, as a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.config import Llama3RopeScaling
from backend.errors import ModelError

# GGUF's architectures, and what Hugging Face calls the model and its class.
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

# Gemma 2 and 3 of 27 billion parameters scale attention by the share of a head in the hidden size, all others by the
# size of a head. GGUF does not say which, so the number of layers tells, as it does in llama.cpp.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

# Every Llama 3.1 to 3.3 has these; GGUF keeps only what comes of them, a divisor for each frequency.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


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
        self.architecture = str(fields.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ModelError(f"{source}: general.architecture is {self.architecture!r}, expected one of {known}")

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the architecture, such as ``block_count``."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        """A field of the architecture that must be there.

        Raises:
            ModelError: it is not.
        """
        return self._needed(f"{self.architecture}.{name}")

    def tokenizer(self, name: str, default: Any = None) -> Any:
        """A field of the tokenizer, such as ``bos_token_id``."""
        return self.fields.get(f"tokenizer.ggml.{name}", default)

    def need_tokenizer(self, name: str) -> Any:
        """A field of the tokenizer that must be there.

        Raises:
            ModelError: it is not.
        """
        return self._needed(f"tokenizer.ggml.{name}")

    def _needed(self, name: str) -> Any:
        if (value := self.fields.get(name)) is None:
            raise ModelError(f"{self.source}: metadata {name} is missing")
        return value

    @property
    def is_gemma(self) -> bool:
        """Whether norms are stored with the one added that Hugging Face's files leave out, and lie on outputs too."""
        return self.architecture.startswith("gemma")

    @property
    def is_mixtral(self) -> bool:
        """Mixtral goes by the name of llama and is known by its experts."""
        return self.architecture == "llama" and self.get("expert_count", 0) > 0

    @property
    def rotates_neighbours(self) -> bool:
        """Whether rows of queries and keys are ordered for rotating elements 2i and 2i + 1 together."""
        return self.architecture in ("llama", "smollm3")


def hf_config(metadata: GgufMetadata, rope_divisors: npt.NDArray[np.float32] | None) -> dict[str, Any]:
    """The contents of ``config.json``.

    Args:
        rope_divisors: the tensor ``rope_freqs``, if there is one.

    Raises:
        ModelError: a field is missing, or asks for something that is not supported.
    """
    field = metadata.get
    model_type, class_name = _MIXTRAL if metadata.is_mixtral else _ARCHITECTURES[metadata.architecture]
    heads, hidden = metadata.need("attention.head_count"), metadata.need("embedding_length")
    head_dim = field("attention.key_length", hidden // heads)
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.need("feed_forward_length"),
        "num_hidden_layers": metadata.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.need("context_length"),
        "rms_norm_eps": _short_float(field("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": field("rope.freq_base", 1e6 if metadata.architecture == "gemma3" else 10000.0),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "vocab_size": len(metadata.need_tokenizer("tokens")),
        "bos_token_id": metadata.tokenizer("bos_token_id"),
        "eos_token_id": _end_tokens(metadata),
    }
    if scaling := _rope_scaling(metadata, config["rope_theta"], head_dim, rope_divisors):
        config["rope_scaling"] = scaling
    if metadata.is_gemma:
        config |= _gemma(metadata, hidden // heads, head_dim)
    if field("expert_count"):
        config |= _experts(metadata)
    return config


def _end_tokens(metadata: GgufMetadata) -> int | list[int] | None:
    """A chat's turn may end otherwise than a text does."""
    named = (metadata.tokenizer(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
    ids = list(dict.fromkeys(token for token in named if token is not None))
    return ids[0] if len(ids) == 1 else ids or None


def _gemma(metadata: GgufMetadata, share: int, head_dim: int) -> dict[str, Any]:
    large = metadata.need("block_count") == _GEMMA_27B_LAYERS[metadata.architecture]
    gemma3 = metadata.architecture == "gemma3"
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": share if large else head_dim,
        "sliding_window": metadata.get("attention.sliding_window", 1024 if gemma3 else 4096),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", None if gemma3 else 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", None if gemma3 else 30.0),
        **({"rope_local_base_freq": metadata.get("rope.freq_base_swa", 10000.0)} if gemma3 else {}),
    }


def _experts(metadata: GgufMetadata) -> dict[str, Any]:
    count = metadata.need("expert_count")
    common = {"num_experts_per_tok": metadata.need("expert_used_count")}
    if metadata.architecture == "qwen3moe":
        size = metadata.need("expert_feed_forward_length")
        # llama.cpp always scales the chosen experts of this architecture to a sum of 1.
        return {**common, "num_experts": count, "moe_intermediate_size": size, "norm_topk_prob": True}
    return {**common, "num_local_experts": count}


def _rope_scaling(
    metadata: GgufMetadata, theta: float, head_dim: int, divisors: npt.NDArray[np.float32] | None
) -> dict[str, Any] | None:
    dimensions = metadata.get("rope.dimension_count", head_dim)
    if dimensions != head_dim:
        raise ModelError(f"{metadata.source}: rope.dimension_count is {dimensions}, expected the head's {head_dim}")
    if divisors is not None:
        return _llama3_scaling(metadata, theta, head_dim, divisors)
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _short_float(metadata.need("rope.scaling.factor"))}
    if kind != "none":
        raise ModelError(f"{metadata.source}: rope.scaling.type is {kind!r}, expected 'none' or 'linear'")
    return None


def _llama3_scaling(
    metadata: GgufMetadata, theta: float, head_dim: int, divisors: npt.NDArray[np.float32]
) -> dict[str, Any]:
    """Llama 3.1's scaling that gives these divisors, checked by giving them again."""
    import torch

    from backend.rope import scaled_frequencies

    factor = _short_float(float(divisors.max()))
    scaling = Llama3RopeScaling(factor, _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT)
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    expected = (frequencies / scaled_frequencies(scaling, frequencies)).numpy()
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
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
    """GGUF stores 1e-5 as a float32; give back the decimal that was meant."""
    return float(f"{value:.6g}")
