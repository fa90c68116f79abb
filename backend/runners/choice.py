"""Chooses the runner of a model: the fastest one that passes its self-test here, or the torch reference."""

from __future__ import annotations

import os

import torch

from backend.checkpoints.gguf.convert import Progress
from backend.engine.config import EngineConfig
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner
from backend.errors import ModelError
from backend.model_loader.linears import linears
from backend.model_loader.weights import ModelWeights
from backend.models.config import KvDtype, ModelConfig
from backend.models.partition import ModelPart, partition
from backend.runners.cuda.choice import CUDA_DTYPES, check_settings, choose_cuda
from backend.runners.errors import RunnerUnavailable
from backend.runners.fused.build import load_fused_library
from backend.runners.fused.layout import FloatPrecision, Kernels, KVPrecision, rounds_rows_coarsely
from backend.runners.fused.runner import FusedRunner, check_shape
from backend.runners.parallel.micro_batches import CUDA_FEWEST_ROWS
from backend.runners.parallel.settings import DeviceSettings, ParallelSettings
from backend.runners.self_test import max_relative_error
from backend.runners.torch.runner import TorchRunner

_TORCH_DTYPES = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CPU_KV_MEMORY = 512 * 2**20
_FUSED_KV: dict[KvDtype, KVPrecision] = {"auto": "float16", "int8": "int8"}
_FUSED_FLOATS: dict[str, FloatPrecision] = {"auto": "auto", "float16": "float16", "bfloat16": "bfloat16"}

MAX_RELATIVE_ERROR = 0.01
"""Largest relative error of logits in the self-test; float16 stays ten times below it, bfloat16 three times."""
_MAX_RELATIVE_ERROR_INT8 = 0.1
"""The same if activations or KV are quantised to int8, which alone causes up to .06 with weights of four bits; with a
second byte for large groups of activations a tenth of that."""


def choose_runner(
    config: ModelConfig, weights: ModelWeights, engine: EngineConfig, max_context: int, progress: Progress
) -> ModelRunner:
    """Builds the runner with as many KV blocks as fit the configured memory; free blocks serve as prefix cache.

    Args:
        weights: quantised or not; their format is not changed.

    Raises:
        ModelError: the KV memory does not hold a single block, or the device that was asked for cannot serve.
    """
    torch.set_num_threads(engine.threads)
    config = config.with_max_context(max_context)
    if engine.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no CUDA device; expected auto or cpu")
    if engine.device != "cpu" and torch.cuda.is_available():
        try:
            return choose_cuda(config, weights, engine, max_context, progress)
        except RunnerUnavailable as reason:
            if engine.device == "cuda":
                raise ModelError(f"--device cuda: {reason}; expected auto or cpu") from reason
            progress(f"serving on the CPU, although there is a CUDA device: {reason}")
    try:
        return _fused(config, weights, engine, max_context, progress)
    except RunnerUnavailable as reason:
        progress(f"serving with torch, which is slower: {reason}")
    dtype = _TORCH_DTYPES[engine.dtype]
    num_blocks = _num_blocks(engine, TorchRunner.block_bytes(config, dtype, engine.kv_dtype))
    return TorchRunner(
        config, weights, num_blocks, _max_tokens_in_kv(config, num_blocks, max_context), dtype, engine.kv_dtype
    )


def choose_parallel(
    config: ModelConfig, engine: EngineConfig, max_context: int, progress: Progress
) -> ParallelSettings:
    """How several processes compute a model, on a device each or on the CPU; ``kv_memory`` is of all of them together.

    Raises:
        ModelError: the model cannot be divided like that, or the settings or devices cannot be had in parallel.
    """
    parts = partition(config, engine.tensor_parallel, engine.pipeline_parallel)
    if engine.device == "cuda" or (engine.device == "auto" and torch.cuda.is_available()):
        try:
            return _on_devices(config, parts, engine, max_context)
        except RunnerUnavailable as reason:
            if engine.device == "cuda":
                raise ModelError(f"--device cuda: {reason}; expected auto or cpu") from reason
            progress(f"serving on the CPU, although there is a CUDA device: {reason}")
    dtype = _TORCH_DTYPES[engine.dtype]
    num_blocks = _num_blocks(engine, TorchRunner.block_bytes(config, dtype, engine.kv_dtype))
    return ParallelSettings(
        parts,
        engine.quantization,
        str(dtype).removeprefix("torch."),
        engine.kv_dtype,
        num_blocks,
        _max_tokens_in_kv(config, num_blocks, max_context),
        max(1, engine.threads // len(parts)),
    )


def _on_devices(
    config: ModelConfig, parts: tuple[ModelPart, ...], engine: EngineConfig, max_context: int
) -> ParallelSettings:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < len(parts):
        flags = {"--tensor-parallel": engine.tensor_parallel, "--pipeline-parallel": engine.pipeline_parallel}
        said = " and ".join(f"{flag} {count}" for flag, count in flags.items() if count > 1)
        raise RunnerUnavailable(f"{said}: {len(parts)} devices are needed, one for each rank, and torch sees {found}")
    check_settings(config, engine)
    from backend.runners.cuda.runner import CUDA_BATCH, CUDA_STEP_TOKENS

    devices = DeviceSettings(
        "cuda", engine.kv_memory, engine.max_batch or CUDA_BATCH, engine.step_tokens or CUDA_STEP_TOKENS
    )
    return ParallelSettings(
        parts,
        engine.quantization,
        str(CUDA_DTYPES[engine.dtype]).removeprefix("torch."),
        engine.kv_dtype,
        engine.kv_blocks,
        max_context,
        max(1, engine.threads // len(parts)),
        CUDA_FEWEST_ROWS,
        devices,
    )


def _fused(
    config: ModelConfig, weights: ModelWeights, engine: EngineConfig, max_context: int, progress: Progress
) -> FusedRunner:
    if engine.dtype not in _FUSED_FLOATS:
        raise RunnerUnavailable(f"the fused step does not compute in {engine.dtype}")
    if engine.kv_dtype not in _FUSED_KV:
        raise RunnerUnavailable(f"the fused step does not store keys and values in {engine.kv_dtype}")
    kv_precision, floats = _FUSED_KV[engine.kv_dtype], _FUSED_FLOATS[engine.dtype]
    check_shape(config)
    library = load_fused_library(progress)
    kernels = Kernels.of(library)
    if floats == "bfloat16" and not kernels.bfloat16_dots:
        raise RunnerUnavailable("the fused step does not compute in bfloat16 on a processor that does not multiply it")

    def make(model: ModelConfig, some: ModelWeights, num_blocks: int, context: int) -> FusedRunner:
        return FusedRunner(library, model, some, num_blocks, context, engine.threads, kv_precision, floats)

    error = max_relative_error(config, weights, make)
    matrices = [*linears(weights).values(), weights.head]
    coarse = kv_precision == "int8" or any(rounds_rows_coarsely(matrix, kernels) for matrix in matrices)
    most = _MAX_RELATIVE_ERROR_INT8 if coarse else MAX_RELATIVE_ERROR
    if error > most:
        raise RunnerUnavailable(f"the fused step failed its self-test (relative error {error:.3g}, at most {most})")
    num_blocks = _num_blocks(engine, FusedRunner.block_bytes(config, kv_precision))
    return make(config, weights, num_blocks, _max_tokens_in_kv(config, num_blocks, max_context))


def _max_tokens_in_kv(config: ModelConfig, num_blocks: int, max_context: int) -> int:
    """Longest context: without an attention window, all of its tokens have to fit the KV blocks."""
    return max_context if config.attention_window is not None else min(max_context, num_blocks * BLOCK_SIZE)


def _num_blocks(engine: EngineConfig, block_bytes: int) -> int:
    if engine.kv_blocks is not None:
        return engine.kv_blocks
    memory = _CPU_KV_MEMORY if engine.kv_memory is None else engine.kv_memory
    if memory < block_bytes:
        raise ModelError(f"--kv-memory: {memory} bytes hold no KV block, expected at least {block_bytes}")
    # A system that overcommits would only fail later, when the blocks are used.
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory > there:
        raise ModelError(f"--kv-memory: {memory} bytes are more than the {there} bytes that this machine has")
    return memory // block_bytes
