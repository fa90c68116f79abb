"""A small random model for the CUDA runner, on any device."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from backend.engine.model_runner import BLOCK_SIZE, StepInput
from backend.model_loader.weights import LayerWeights, Linear, Mlp, ModelWeights
from backend.models.config import ModelConfig

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=97,
    hidden_size=96,
    intermediate_size=112,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)
VARIANTS = {
    "llama": CONFIG,
    "biases": dataclasses.replace(CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True),
    "head norms": dataclasses.replace(CONFIG, qk_norm=True),
    "windows": dataclasses.replace(CONFIG, windows=(20, None), attention_scale=0.2, attention_softcap=10.0),
}


def random_weights(config: ModelConfig, seed: int = 0) -> ModelWeights:
    """Weights with random biases and norms too, so that leaving one out changes the logits."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * math.sqrt(1 / shape[-1])

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    def linear(rows: int, columns: int, bias: bool) -> Linear:
        return Linear(random(rows, columns), 0.3 * torch.randn(rows, generator=generator) if bias else None)

    c = config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=norm(c.hidden_size),
            query=linear(queries, c.hidden_size, c.qkv_bias),
            key=linear(keys, c.hidden_size, c.qkv_bias),
            value=linear(keys, c.hidden_size, c.qkv_bias),
            query_norm=norm(c.head_dim) if c.qk_norm else None,
            key_norm=norm(c.head_dim) if c.qk_norm else None,
            output=linear(c.hidden_size, queries, c.output_bias),
            post_attention_norm=norm(c.hidden_size),
            mlps=(
                Mlp(
                    linear(c.intermediate_size, c.hidden_size, c.mlp_bias),
                    linear(c.intermediate_size, c.hidden_size, c.mlp_bias),
                    linear(c.hidden_size, c.intermediate_size, c.mlp_bias),
                ),
            ),
        )

    layers = tuple(layer() for _ in range(c.num_layers))
    embedding = torch.randn(c.vocab_size, c.hidden_size, generator=generator)
    return ModelWeights(embedding, layers, norm(c.hidden_size), random(c.vocab_size, c.hidden_size))


def step_of(chunks: list[tuple[list[int], int, int]], last_rows_only: bool = False, hidden: bool = False) -> StepInput:
    """A step of some (blocks, first position, rows), with tokens that follow from the positions."""
    counts = [count for _, _, count in chunks]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    rows = np.repeat(np.arange(len(chunks)), counts)
    positions = np.concatenate([np.arange(start, start + count) for _, start, count in chunks])
    tables = np.zeros((len(chunks), max(len(blocks) for blocks, _, _ in chunks)), dtype=np.int32)
    for index, (blocks, _, _) in enumerate(chunks):
        tables[index, : len(blocks)] = blocks
    every = np.arange(len(positions), dtype=np.int32)
    return StepInput(
        token_ids=((positions * 31 + tables[rows, 0] * 7) % CONFIG.vocab_size).astype(np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=starts,
        block_tables=tables,
        logits_rows=starts[1:] - 1 if last_rows_only else every,
        hidden_rows=every if hidden else every[:0],
    )


STEPS = [
    step_of([([5, 2, 7], 0, 19)], hidden=True),
    step_of([([5, 2, 7], 19, 6), ([1, 4], 0, 21)]),
    step_of([([3], 0, 1), ([5, 2, 7], 25, 9), ([1, 4], 21, 1)], last_rows_only=True),
    step_of([([3], 1, 1), ([5, 2, 7], 34, 1), ([1, 4], 22, 1)]),
    step_of([([1, 4], 23, 1)]),
]
"""Prefill across a block's border, chunks with a start, a mixed step, and decode of three rows and of one."""
