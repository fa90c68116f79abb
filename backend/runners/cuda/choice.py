"""Builds the CUDA runner if there is a device with Triton and the kernels pass the self-test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from backend.checkpoints.gguf.convert import Progress
from backend.engine.config import EngineConfig
from backend.engine.model_runner import ModelRunner
from backend.model_loader.weights import ModelWeights
from backend.models.config import ModelConfig
from backend.quantized_weights.quantized_linear import CannotQuantize
from backend.runners.errors import RunnerUnavailable
from backend.runners.self_test import max_relative_error
from backend.runners.torch.exchange import Exchange, NoExchange

CUDA_DTYPES = {
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
    check_settings(config, engine)
    from backend.runners.cuda.runner import CUDA_BATCH, CUDA_STEP_TOKENS, CudaRunner

    dtype = CUDA_DTYPES[engine.dtype]
    check_kernels(config, weights, dtype)
    with unavailable_reasons():
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


def check_settings(config: ModelConfig, engine: EngineConfig) -> None:
    """Checks all that can be known before the weights.

    Raises:
        RunnerUnavailable: the CUDA runner cannot serve such a model with these settings.
    """
    if engine.kv_dtype != "auto":
        raise RunnerUnavailable(f"the CUDA kernels do not store keys and values in {engine.kv_dtype}")
    try:
        from backend.runners.cuda.decoder import check_model
    except ImportError as error:
        raise RunnerUnavailable("Triton is not installed") from error
    check_model(config)


def check_kernels(
    config: ModelConfig,
    weights: ModelWeights,
    dtype: torch.dtype,
    device: str = "cuda",
    exchange: Exchange = NoExchange(),  # noqa: B008 - has no state
) -> None:
    """Tests the kernels on a device with a model's first layers.

    Args:
        exchange: where the weights are a part of a model: of a part alone, which waits for no other.

    Raises:
        RunnerUnavailable: they do not run, or do not compute what torch does.
    """
    from backend.runners.cuda.runner import CudaRunner

    def make(small: ModelConfig, its_weights: ModelWeights, num_blocks: int, context: int) -> CudaRunner:
        runner = CudaRunner(small, its_weights, num_blocks, context, _SELF_TEST_BATCH, dtype, device, exchange=exchange)
        runner.record(lambda sentence: None)
        return runner

    with unavailable_reasons():
        distance = max_relative_error(config, weights, make, exchange)
    if distance > _MAX_RELATIVE_ERROR[dtype]:
        raise RunnerUnavailable(f"the kernels failed their self-test (relative error {distance:.3g})")


@contextmanager
def unavailable_reasons() -> Iterator[None]:
    """Raises RunnerUnavailable for whatever a runner on a device cannot be made or tested for."""
    from triton.runtime.errors import TritonError

    try:
        yield
    except CannotQuantize as error:
        raise RunnerUnavailable(str(error)) from error
    except torch.cuda.OutOfMemoryError as error:
        raise RunnerUnavailable("the device has too little memory for the weights") from error
    except (TritonError, RuntimeError) as error:  # what a compiler, a driver or cuBLAS raises
        raise RunnerUnavailable(f"the kernels do not run: {error}") from error
