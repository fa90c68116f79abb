"""What a model is and how the engine runs it, parsed once and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.errors import ModelError

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 (low frequencies stretched, high ones kept)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one decoder of the llama family. Sizes are counts of elements, never bytes."""

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
    rope_scaling: Llama3RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one key/value head (grouped-query attention, arXiv 2305.13245)."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], source: str) -> ModelConfig:
        """Reads the contents of a Hugging Face ``config.json``.

        Args:
            values: the parsed file.
            source: name of the file, for error messages.

        Raises:
            ModelError: a field is missing, wrong, or asks for something this decoder does not do.
        """
        reader = _Reader(values, source)
        model_type = reader.text("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise reader.error("model_type", f"one of {', '.join(SUPPORTED_MODEL_TYPES)}")
        if values.get("hidden_act", "silu") != "silu":
            raise reader.error("hidden_act", "'silu'")
        if values.get("quantization_config"):
            raise reader.error("quantization_config", "absent: weights must be plain float tensors")
        hidden_size = reader.count("hidden_size")
        num_heads = reader.count("num_attention_heads")
        num_kv_heads = reader.count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise reader.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
        head_dim = reader.count("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise reader.error("head_dim", "an even number")
        theta, scaling = _rope(reader)
        qkv_bias = model_type == "qwen2" or bool(values.get("attention_bias"))
        return cls(
            model_type=model_type,
            vocab_size=reader.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.count("intermediate_size"),
            num_layers=reader.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=_positions(reader),
            tie_word_embeddings=bool(values.get("tie_word_embeddings")),
            qkv_bias=qkv_bias,
            output_bias=model_type != "qwen2" and bool(values.get("attention_bias")),
            mlp_bias=bool(values.get("mlp_bias")),
            qk_norm=model_type == "qwen3",
            eos_token_ids=reader.token_ids("eos_token_id"),
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Memory is in bytes, the rest in tokens, sequences or threads."""

    kv_memory: int = 512 * 2**20
    max_batch: int = 32
    max_context: int | None = None
    """None: what the model was made for, or what the KV memory holds if that is less."""
    step_tokens: int = 128
    """Tokens computed in one step at most. Small, so that a long prompt delays running answers little."""
    max_waiting: int = 256
    """Sequences admitted to the queue beyond ``max_batch``."""
    threads: int = 1


class _Reader:
    """Typed access to a parsed ``config.json`` with errors that name file and field."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def error(self, field: str, expected: str) -> ModelError:
        return ModelError(f"{self.source}: {field} is {self.values.get(field)!r}, expected {expected}")

    def text(self, field: str) -> str:
        value = self.values.get(field)
        if not isinstance(value, str):
            raise self.error(field, "a string")
        return value

    def count(self, field: str, default: int | None = None) -> int:
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, "a positive integer")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.values.get(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(field, "a positive number")
        return float(value)

    def token_ids(self, field: str) -> tuple[int, ...]:
        value = self.values.get(field)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self.error(field, "a token id or a list of token ids")
        return tuple(ids)


def _positions(reader: _Reader) -> int:
    """Longest context served. Inside its window, sliding attention is plain attention, so that is the limit."""
    positions = reader.count("max_position_embeddings")
    window = reader.values.get("sliding_window")
    uses_window = reader.values.get("use_sliding_window", reader.values["model_type"] == "mistral")
    return min(positions, reader.count("sliding_window")) if window and uses_window else positions


def _rope(reader: _Reader) -> tuple[float, Llama3RopeScaling | None]:
    """Rotary base and scaling, from either spelling: ``rope_parameters``, or ``rope_theta`` + ``rope_scaling``."""
    field = "rope_parameters" if reader.values.get("rope_parameters") else "rope_scaling"
    values = reader.values.get(field) or {}
    if not isinstance(values, Mapping):
        raise reader.error(field, "an object")
    rope = _Reader(values, f"{reader.source}: {field}")
    theta = rope.number("rope_theta", reader.number("rope_theta", 10000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    if values.get("partial_rotary_factor", reader.values.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise reader.error("partial_rotary_factor", "1.0")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise rope.error("rope_type", "'default' or 'llama3'")
    scaling = Llama3RopeScaling(
        factor=rope.number("factor", 8.0),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        original_max_position_embeddings=rope.count("original_max_position_embeddings"),
    )
    return theta, scaling
