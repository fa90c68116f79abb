"""Chooses what computes the model: the fastest runner that proves itself here, or the torch reference."""

from __future__ import annotations

import torch

from backend.config import EngineConfig, ModelConfig
from backend.errors import ModelError
from backend.gguf_file import Progress
from backend.runner import BLOCK_SIZE, ModelRunner
from backend.torch_runner import TorchRunner
from backend.weights import ModelWeights


def choose_runner(
    config: ModelConfig, weights: ModelWeights, engine: EngineConfig, max_context: int, progress: Progress
) -> ModelRunner:
    """Builds the runner and gives it as many KV blocks as fit the configured memory and can be of use.

    Raises:
        ModelError: the KV memory does not hold a single block.
    """
    torch.set_num_threads(engine.threads)
    num_blocks = _num_blocks(engine, TorchRunner.block_bytes(config), max_context)
    return TorchRunner(config, weights, num_blocks, max_context)


def _num_blocks(engine: EngineConfig, block_bytes: int, max_context: int) -> int:
    held = engine.kv_memory // block_bytes
    if held < 1:
        raise ModelError(f"--kv-memory: {engine.kv_memory} bytes hold no KV block, expected at least {block_bytes}")
    useful = engine.max_batch * (-(-max_context // BLOCK_SIZE))
    return min(held, useful)
