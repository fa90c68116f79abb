"""The shape of a decoder, parsed once and frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
KvDtype = Literal["auto", "int8", "fp8"]


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 (low frequencies stretched, high ones kept)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Every position divided by ``factor`` (position interpolation, arXiv 2306.15595)."""

    factor: float


RopeScaling = Llama3RopeScaling | LinearRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of a layer: its base and how its frequencies are scaled."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP (Mixtral, arXiv 2401.04088)."""

    count: int
    per_token: int
    intermediate_size: int
    normalise: bool
    """Whether the weights of the chosen experts are scaled to a sum of 1."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that have one ordinary MLP all the same."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one decoder. Sizes are counts of elements, never bytes.

    The fields up to ``eos_token_ids`` describe a decoder as Llama, Qwen and Mistral build it; the ones after it are
    what other families do differently, with Llama's way as the default.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    activation: Activation = "silu"
    """Of the gate in the MLP."""
    windows: tuple[int | None, ...] = ()
    """For each layer, how many tokens a token sees, itself included; None: all before it. Empty: all, everywhere."""
    ropes: tuple[Rope | None, ...] = ()
    """For each layer, its rotary embedding, or None for a layer that knows no positions (NoPE, arXiv 2305.19466).
    Empty: ``rope_theta`` and ``rope_scaling``, everywhere."""
    attention_scale: float | None = None
    """Factor of the attention scores; None: ``head_dim ** -0.5``."""
    attention_softcap: float | None = None
    """Attention scores x become ``cap * tanh(x / cap)`` (Gemma 2, arXiv 2408.00118)."""
    logit_softcap: float | None = None
    """The same for the logits."""
    embedding_scale: float = 1.0
    """Factor of the token embeddings, where they enter the first layer."""
    norm_offset: float = 0.0
    """Added to every norm weight: Gemma's files hold the weight minus one."""
    output_norms: bool = False
    """Whether attention and MLP also normalise what they add to the residual stream."""
    experts: Experts | None = None

    def window(self, layer: int) -> int | None:
        """Tokens that a token of this layer sees, itself included; None: all before it."""
        return self.windows[layer] if self.windows else None

    @property
    def attention_window(self) -> int | None:
        """Tokens that a token sees in the layer that sees most, itself included; None: all before it."""
        widest = max(window or 0 for window in self.windows) if self.windows and all(self.windows) else 0
        return widest or None

    def rope(self, layer: int) -> Rope | None:
        """Rotary embedding of a layer; None: the layer has none."""
        return self.ropes[layer] if self.ropes else Rope(self.rope_theta, self.rope_scaling)

    def layer_experts(self, layer: int) -> Experts | None:
        """The mixture of experts of a layer; None: it has one ordinary MLP."""
        return self.experts if self.experts and layer not in self.experts.dense_layers else None

    def with_max_context(self, max_context: int) -> ModelConfig:
        """The same model for contexts of at most so many tokens: windows that no context outgrows are dropped."""
        windows = tuple(window if window and window < max_context else None for window in self.windows)
        return replace(self, windows=windows if any(windows) else ())

    def features_beyond_llama(self) -> tuple[str, ...]:
        """What this decoder does that Llama, Qwen and full-attention Mistral do not, in words for people.

        Runners that only do the common shape refuse a model for which this is not empty.
        """
        features = {
            f"{self.activation} activation": self.activation != "silu",
            "sliding-window attention": any(self.windows),
            "layers with rotary embeddings of their own": bool(self.ropes),
            f"an attention scale of {self.attention_scale}": self.attention_scale is not None,
            "softcapped attention": self.attention_softcap is not None,
            "softcapped logits": self.logit_softcap is not None,
            "scaled embeddings": self.embedding_scale != 1.0,
            "norms on the outputs of attention and MLP": self.output_norms,
            "a mixture of experts": self.experts is not None,
        }
        return tuple(name for name, present in features.items() if present)
