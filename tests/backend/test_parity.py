"""Our decoders compute what transformers computes, on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from backend.config import ModelConfig
from backend.fused_runner import FusedRunner
from backend.model_source import ModelSource
from backend.runner import ModelRunner
from backend.torch_runner import TorchRunner
from backend.warm_up import single_sequence_step
from backend.weights import ModelWeights, load_weights, read_config
from tests.backend.conftest import built_library

SIZES = {
    "vocab_size": 500,
    "hidden_size": 192,
    "intermediate_size": 304,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-3.1-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-no-groups": ("Llama", {"num_key_value_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-groups-of-six": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"num_attention_heads": 4, "head_dim": 128}),
}
TOKENS = np.random.default_rng(1).integers(0, 500, 90).astype(np.int32)


def save_random_model(name: str, directory: Path) -> Any:
    """Writes a small model with random weights, biases and norms, and returns transformers' own."""
    kind, changes = FAMILY[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    reference = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    reference.save_pretrained(directory)
    return reference


def chunked(runner: ModelRunner, tokens: np.ndarray[Any, np.dtype[np.int32]], *sizes: int) -> torch.Tensor:
    """Logits of every token, computed in chunks of the given sizes."""
    parts, start = [], 0
    for size in sizes:
        parts.append(runner.run(single_sequence_step(tokens[start : start + size], start)).logits.clone())
        start += size
    assert start == len(tokens)
    return torch.cat(parts)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def divergence(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean KL divergence of the next-token distributions, in nats."""
    p, q = expected.log_softmax(-1), got.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", FAMILY)
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    """float32 agrees to 1e-4, half floats to 5e-3, whole and in chunks, for every kind of the family."""
    reference = save_random_model(name, tmp_path)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config)
    with torch.inference_mode():
        expected = reference(torch.from_numpy(TOKENS).long()[None]).logits[0]
    plain = TorchRunner(config, weights, num_blocks=8, max_context=128)
    assert relative_error(chunked(plain, TOKENS, 90), expected) < 1e-4
    assert relative_error(chunked(plain, TOKENS, 17, 1, 40, 32), expected) < 1e-4
    fused = FusedRunner(built_library(), config, weights, num_blocks=8, max_context=128, threads=2)
    assert relative_error(chunked(fused, TOKENS, 90), expected) < 5e-3
    assert torch.equal(chunked(fused, TOKENS, 17, 1, 40, 32), chunked(fused, TOKENS, 90))


def test_the_real_model_agrees_with_transformers(
    source: ModelSource, config: ModelConfig, weights: ModelWeights
) -> None:
    """SmolLM2: the reference to 1e-4; what is served stays within a KL divergence of 0.001 and its top choice."""
    text = (
        "The sea is old. In 1492 three ships crossed it; later, engineers measured its currents with great care. "
        "def area(r): return 3.14159 * r ** 2\nPoets wrote of salt, and children asked why the water is blue."
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.directory)
    tokens = np.array(tokenizer(text)["input_ids"], dtype=np.int32)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32)
    reference.eval()
    with torch.inference_mode():
        expected = reference(torch.from_numpy(tokens).long()[None]).logits[0]
    plain = TorchRunner(config, weights, num_blocks=8, max_context=128)
    assert relative_error(chunked(plain, tokens, len(tokens)), expected) < 1e-4
    fused = FusedRunner(built_library(), config, weights, num_blocks=8, max_context=128, threads=2)
    served = chunked(fused, tokens, len(tokens))
    assert divergence(served, expected) < 1e-3
    assert float((served.argmax(-1) == expected.argmax(-1)).float().mean()) >= 0.99
