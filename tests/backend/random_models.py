"""Small models with random weights, one of each kind of decoder that is served, and steps to run them with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, SequenceRows, StepInput, pack

VOCABULARY = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 24
"""Much shorter than the sequences: most of what a windowed layer sees must have left the window."""


@dataclass(frozen=True)
class Kind:
    """A class of transformers and what its config changes of ``SIZES``."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        """transformers' config of it."""
        return getattr(transformers, f"{self.family}Config")(**{**SIZES, **self.changes})

    def build(self) -> Any:
        """transformers' model in float32, with random weights, biases and norms, computing with eager attention."""
        torch.manual_seed(3)
        model_class = getattr(transformers, f"{self.family.removesuffix('Text')}ForCausalLM")
        reference = model_class(self.config()).float().eval()
        reference.set_attn_implementation("eager")  # the one implementation that caps attention scores
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                elif name.endswith("mlp.gate.weight"):
                    parameter.copy_(torch.randn_like(parameter) * 0.3)
        return reference


def of_vectors(kind: Kind, **shape: int) -> Kind:
    """The same in sizes that the kernels of a CPU take: heads of 64, and no size a power of two."""
    sizes = {"hidden_size": 192, "intermediate_size": 304, "num_attention_heads": 6, "num_key_value_heads": 2}
    return Kind(kind.family, {**kind.changes, **sizes, "head_dim": 64, **shape})


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SHARPER_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20}
KINDS: dict[str, Kind] = {
    "llama": Kind("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-3.1": Kind("Llama", {"rope_parameters": LLAMA3_SCALING, "tie_word_embeddings": True}),
    "llama-linear": Kind("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": Kind("Mistral", {"sliding_window": WINDOW}),
    "mistral-unlimited": Kind("Mistral", {"sliding_window": None}),
    "mixtral": Kind("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-windowed": Kind("Mixtral", {"num_local_experts": 3, "sliding_window": WINDOW}),
    "qwen2": Kind("Qwen2"),
    "qwen2-windowed": Kind("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": Kind("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-windowed": Kind(
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen3-moe": Kind(
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "qwen3-moe-mixed": Kind(
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "smollm2": Kind("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "smollm3": Kind("SmolLM3"),
    "smollm3-windowed": Kind(
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [1, 0, 0, 1], "attention_bias": True},
    ),
    "gemma2": Kind("Gemma2", {"sliding_window": WINDOW, **_SHARPER_CAPS}),
    "gemma2-uncapped": Kind(
        "Gemma2", {"sliding_window": WINDOW, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    ),
    "gemma3": Kind("Gemma3Text", {"sliding_window": WINDOW, "num_hidden_layers": 7, "query_pre_attn_scalar": 40}),
    "gemma3-long": Kind(
        "Gemma3Text",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
}


def random_tokens(count: int, seed: int = 1) -> npt.NDArray[np.int32]:
    """Token ids of the small vocabulary."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.int32)


@dataclass
class Paged:
    """A sequence on blocks of its own choosing, and how far it has been computed."""

    tokens: npt.NDArray[np.int32]
    blocks: list[int]
    computed: int = 0


def step_of(chunks: list[tuple[Paged, int]]) -> StepInput:
    """The next tokens of some sequences, so many of each, as one step; logits and states of every row are wanted."""
    sequences = []
    for sequence, count in chunks:
        start, end = sequence.computed, sequence.computed + count
        held = sequence.blocks[: -(-end // BLOCK_SIZE)]
        sequences.append(SequenceRows(sequence.tokens[start:end].tolist(), start, held))
        sequence.computed = end
    rows = range(sum(count for _, count in chunks))
    return pack(sequences, rows, rows)


def chunked(runner: ModelRunner, tokens: npt.NDArray[np.int32], *sizes: int) -> torch.Tensor:
    """Logits of every token of one sequence, computed in chunks of the given sizes."""
    sequence = Paged(tokens, list(range(-(-len(tokens) // BLOCK_SIZE))))
    parts = [runner.run(step_of([(sequence, size)])).logits.clone() for size in sizes]
    assert sequence.computed == len(tokens)
    return torch.cat(parts)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to the norm of the expected tensor."""
    return float((got - expected).norm() / expected.norm())


def save(kind: Kind, directory: Path) -> Any:
    """Writes the kind's model into a directory and returns transformers' own."""
    reference = kind.build()
    reference.save_pretrained(directory)
    return reference
