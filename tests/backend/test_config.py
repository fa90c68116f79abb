"""config.json is read in both spellings, and what is not supported is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from backend.config import Llama3RopeScaling, ModelConfig
from backend.errors import ModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes}, "config.json")


def test_defaults_follow_the_format() -> None:
    """Heads, head size and rotary base have the defaults that the file format gives them."""
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 32, 10000.0)
    assert config.eos_token_ids == ()
    assert read(eos_token_id=[1, 2]).eos_token_ids == (1, 2)


def test_both_spellings_of_rotary_parameters() -> None:
    """``rope_parameters`` of newer files and ``rope_theta`` with ``rope_scaling`` of older ones mean the same."""
    new = read(rope_parameters={"rope_theta": 5e5, **SCALING})
    old = read(rope_theta=5e5, rope_scaling=SCALING)
    assert new == old
    assert new.rope_scaling == Llama3RopeScaling(32.0, 1.0, 4.0, 8192)


def test_biases_and_norms_by_model_type() -> None:
    """Qwen2 has biases on queries, keys and values without saying so; Qwen3 has per-head norms."""
    assert (read(model_type="qwen2").qkv_bias, read(model_type="qwen2").output_bias) == (True, False)
    assert (read(attention_bias=True).qkv_bias, read(attention_bias=True).output_bias) == (True, True)
    assert read(model_type="qwen3").qk_norm


def test_windows_by_layer() -> None:
    """Each family's rule for which layers slide; a list of layer types overrules those that know one."""
    assert read(model_type="mistral", sliding_window=1024).windows == (1024, 1024)
    assert read(model_type="mistral", sliding_window=None).windows == ()
    assert read(model_type="mixtral").windows == ()
    assert read(model_type="qwen2", sliding_window=1024, use_sliding_window=False).windows == ()
    qwen = {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    assert read(**qwen).windows == (None, 64)
    assert read(**qwen, layer_types=["sliding_attention", "full_attention"]).windows == (64, None)
    assert read(model_type="gemma2", num_hidden_layers=4).windows == (4096, None, 4096, None)
    assert read(model_type="gemma3_text", num_hidden_layers=6).windows == (4096,) * 5 + (None,)


def test_a_window_that_no_context_outgrows_is_none() -> None:
    """Then the model is plain, and every runner can serve it."""
    mistral = read(model_type="mistral", sliding_window=1024)
    assert mistral.unlike_llama() == ("sliding-window attention",)
    assert mistral.served_up_to(1024).unlike_llama() == ()
    assert mistral.served_up_to(1025).windows == (1024, 1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', expected one of llama"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "big"}, "hidden_size is 'big', expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn', expected 'default', 'linear' or 'llama3'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    """The message names file, field, value and what would be right."""
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        read(**changes)
    assert message in str(caught.value)
