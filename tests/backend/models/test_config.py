"""config.json is read in both spellings, and unsupported values are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from backend.errors import ModelError
from backend.models.config import Experts, LinearRopeScaling, Llama3RopeScaling, ModelConfig, Rope
from backend.models.hf_config import read_hf_config

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
    return read_hf_config({**LLAMA, **changes}, "config.json")


def test_defaults_follow_the_format() -> None:
    """KV heads, head size, rotary base and end tokens have the defaults of the file format."""
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


def test_an_older_scaling_beside_newer_parameters_wins() -> None:
    """``rope_scaling`` overrides ``rope_parameters`` beside it, as in transformers."""
    new = {"rope_type": "default", "rope_theta": 5e5}
    linear = {"rope_type": "linear", "factor": 4.0}
    both = read(rope_parameters=new, rope_scaling=linear)
    assert (both.rope_scaling, both.rope_theta) == (LinearRopeScaling(4.0), 10000.0)
    assert read(rope_parameters=new, rope_scaling=linear, rope_theta=7.0).rope_theta == 7.0
    assert read(rope_parameters=new, rope_scaling=None).rope_theta == 5e5
    with pytest.raises(ModelError, match="'yarn', expected 'default', 'linear' or 'llama3'"):
        read(rope_parameters=new, rope_scaling={"rope_type": "yarn"})


def test_an_older_gemma3_scaling_is_for_layers_with_full_attention() -> None:
    """Gemma 3's ``rope_scaling`` overrides the parameters of layers with full attention and no others."""
    kinds = {
        "full_attention": {"rope_type": "default", "rope_theta": 3e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    config = read(
        model_type="gemma3_text",
        num_hidden_layers=6,
        rope_parameters=kinds,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert (config.rope_theta, config.rope_scaling) == (3e6, LinearRopeScaling(8.0))
    assert config.ropes[0] == Rope(2e4)


def test_biases_and_norms_by_model_type() -> None:
    """Qwen2 has biases on queries, keys and values without a config field, and Qwen3 has head norms."""
    assert (read(model_type="qwen2").qkv_bias, read(model_type="qwen2").output_bias) == (True, False)
    assert (read(attention_bias=True).qkv_bias, read(attention_bias=True).output_bias) == (True, True)
    assert read(model_type="qwen3").qk_norm


def test_windows_by_layer() -> None:
    """Each family has its own rule for windowed layers, and a list of layer types overrides it."""
    assert read(model_type="mistral", sliding_window=1024).windows == (1024, 1024)
    assert read(model_type="mistral", sliding_window=None).windows == ()
    assert read(model_type="mixtral").windows == ()
    assert read(model_type="qwen2", sliding_window=1024, use_sliding_window=False).windows == ()
    qwen = {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    assert read(**qwen).windows == (None, 64)
    assert read(**qwen, layer_types=["sliding_attention", "full_attention"]).windows == (64, None)
    assert read(model_type="gemma2", num_hidden_layers=4).windows == (4096, None, 4096, None)
    assert read(model_type="gemma3_text", num_hidden_layers=6).windows == (4096,) * 5 + (None,)


def test_layers_without_positions() -> None:
    """SmolLM3 layers rotate where the list has 1; without a list every fourth layer does not rotate."""
    rope = Rope(2e6)
    assert read(model_type="smollm3", num_hidden_layers=4).ropes == (rope, rope, rope, None)
    assert read(model_type="smollm3", no_rope_layers=[0, 1, 1]).ropes == (None, rope)
    assert read(model_type="smollm3", no_rope_layers=[1, 1]).ropes == ()


def test_both_spellings_of_gemma_3s_two_rotary_bases() -> None:
    """Gemma 3's windowed layers have a rotary base of their own without scaling, in both spellings and by default."""
    old = read(
        model_type="gemma3_text",
        num_hidden_layers=6,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    new = read(
        model_type="gemma3_text",
        num_hidden_layers=6,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    assert old == new
    assert old.ropes == (Rope(2e4),) * 5 + (Rope(5e5, LinearRopeScaling(8.0)),)
    bare = read(model_type="gemma3_text", num_hidden_layers=6)
    assert bare == read(
        model_type="gemma3_text", num_hidden_layers=6, rope_parameters={"full_attention": {"rope_type": "default"}}
    )
    assert bare.ropes == (Rope(1e4),) * 5 + (Rope(1e6),)


def test_experts_by_model_type() -> None:
    """Mixtral has experts in every layer, and Qwen3 where neither the list nor the step excludes them."""
    assert read(model_type="mixtral").experts == Experts(8, 2, 256, normalise=True)
    qwen = {"model_type": "qwen3_moe", "num_hidden_layers": 5, "moe_intermediate_size": 64, "norm_topk_prob": True}
    plain = read(**qwen, num_experts=16, num_experts_per_tok=4)
    assert plain.experts == Experts(16, 4, 64, normalise=True)
    mixed = read(**qwen, num_local_experts=16, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [layer for layer in range(5) if mixed.layer_experts(layer)] == [1]


def test_the_text_config_of_a_multimodal_model_is_read() -> None:
    """A multimodal Gemma 3's text_config has Gemma's defaults and the end tokens beside it."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = read_hf_config({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}, "config.json")
    assert (config.model_type, config.head_dim, config.num_heads, config.vocab_size) == ("gemma3_text", 256, 8, 262208)
    assert config.eos_token_ids == (1, 106)
    with pytest.raises(ModelError, match="text_config is None, expected an object"):
        read_hf_config({"model_type": "gemma3"}, "config.json")


def test_a_window_that_no_context_outgrows_is_none() -> None:
    """A window as long as the longest context is dropped, so that every runner serves the model."""
    mistral = read(model_type="mistral", sliding_window=1024)
    assert mistral.features_beyond_llama() == ("sliding-window attention",)
    assert mistral.with_max_context(1024).features_beyond_llama() == ()
    assert mistral.with_max_context(1025).windows == (1024, 1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', expected one of llama"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "big"}, "hidden_size is 'big', expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu' or 'gelu_pytorch_tanh'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn', expected 'default', 'linear' or 'llama3'"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        (
            {"eos_token_id": [1, 10**6]},
            "eos_token_id is [1, 1000000], expected a token id or a list of token ids, from 0",
        ),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a positive number"),
        ({"model_type": "gemma2", "hidden_activation": "silu2"}, "hidden_activation is 'silu2', expected 'silu' or"),
        ({"model_type": "gemma2", "final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types is ['full_attention'], expected a"),
        ({"model_type": "gemma2", "layer_types": ["full", "chunked"]}, "values out of 'sliding_attention', 'full"),
        ({"model_type": "gemma2", "sliding_window": -4}, "sliding_window is -4"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"model_type": "smollm3", "no_rope_layers": [2, 1]}, "no_rope_layers"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', expected true or false"),
        ({"rope_scaling": {**SCALING, "low_freq_factor": 4.0}}, "low_freq_factor is 4.0, expected less than"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_unsupported_values_are_named(changes: dict[str, Any], message: str) -> None:
    """An unsupported value is refused with file, field, value and what would be right."""
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        read(**changes)
    assert message in str(caught.value)
