"""Builds the CUDA runner if there is a device with Triton and the kernels pass the self-test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from backend.checkpoints.gguf.convert import Progress
from backend.engine.config import EngineConfig
from backend.engine.model_runner import ModelRunner
from backend.model_loader.weights import ModelWeights
from backend.models.config import ModelConfig
from backend.quantized_weights.quantized_linear import CannotQuantize
from backend.runners.errors import RunnerUnavailable
from backend.runners.self_test import max_relative_error

if TYPE_CHECKING:
    from backend.runners.cuda.runner import CudaRunner

_DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_MAX_RELATIVE_ERROR = {torch.bfloat16: 0.04, torch.float16: 0.01, torch.float32: 0.001}
"""Largest relative error of logits in the self-test; a wrong kernel is beyond 0.1. bfloat16 has 8 bits of mantissa."""
_SELF_TEST_BATCH = 4


def choose_cuda(
    config: ModelConfig, weights: ModelWeights, engine: EngineConfig, max_context: int, progress: Progress
) -> ModelRunner:
    """Tests the kernels on the model's first layers, then loads all of it and records its decode steps.

    Weights are served as they are kept, quantised or not.

    Raises:
        RunnerUnavailable: the CUDA runner cannot serve this model with these settings, or fails the self-test.
        ModelError: the device has less memory than ``--kv-memory`` asks for.
    """
    if engine.kv_dtype != "auto":
        raise RunnerUnavailable(f"the CUDA kernels do not store keys and values in {engine.kv_dtype}")
    try:
        from triton.runtime.errors import TritonError

        from backend.runners.cuda.runner import CUDA_BATCH, CUDA_STEP_TOKENS, CudaRunner
    except ImportError as error:
        raise RunnerUnavailable("Triton is not installed") from error
    dtype = _DTYPES[engine.dtype]

    def make(small: ModelConfig, its_weights: ModelWeights, num_blocks: int, context: int) -> CudaRunner:
        runner = CudaRunner(small, its_weights, num_blocks, context, _SELF_TEST_BATCH, dtype)
        runner.record(lambda sentence: None)
        return runner

    try:
        distance = max_relative_error(config, weights, make)
        if distance > _MAX_RELATIVE_ERROR[dtype]:
            raise RunnerUnavailable(f"the kernels failed their self-test (relative error {distance:.3g})")
        runner = CudaRunner(
            config,
            weights,
            engine.kv_blocks,
            max_context,
            engine.max_batch or CUDA_BATCH,
            dtype,
            kv_memory=engine.kv_memory,
            step_tokens=engine.step_tokens or CUDA_STEP_TOKENS,
        )
        runner.record(progress)
        return runner
    except CannotQuantize as error:
        raise RunnerUnavailable(str(error)) from error
    except torch.cuda.OutOfMemoryError as error:
        raise RunnerUnavailable("the device has too little memory for the weights") from error
    except (TritonError, RuntimeError) as error:  # what a compiler, a driver or cuBLAS raises
        raise RunnerUnavailable(f"the kernels do not run: {error}") from error
