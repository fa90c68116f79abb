"""Small models on several ranks of this machine, and the same on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from backend.engine.model_runner import ModelRunner
from backend.model import load_part
from backend.model_loader.weights import load_weights, read_config
from backend.models.config import KvDtype, ModelConfig
from backend.models.partition import partition
from backend.quantization.selection.choice import quantised
from backend.quantized_weights.names import Quantization
from backend.runners.parallel.runner import ParallelRunner
from backend.runners.parallel.settings import DeviceSettings, ParallelSettings
from backend.runners.torch.runner import TorchRunner
from tests.backend.random_models import Kind, Paged, step_of

if TYPE_CHECKING:
    from backend.runners.cuda.runner import CudaRunner

MOST = 1e-4
"""Largest difference of a logit in float32."""


@dataclass(frozen=True)
class Division:
    """A kind of model, and on how many ranks it is computed."""

    kind: Kind
    tensor: int
    stages: int


CONTEXT = 256
BLOCKS = 24
BATCH = 4
INTERPRETED = DeviceSettings("cpu", None, BATCH, 128)


def model_config(directory: Path) -> ModelConfig:
    """The shape of a saved model for contexts of ``CONTEXT`` tokens."""
    return read_config(directory).with_max_context(CONTEXT)


def one_rank(directory: Path, quantization: Quantization = "none", kv_dtype: KvDtype = "auto") -> TorchRunner:
    """A saved model on one device."""
    config = model_config(directory)
    weights, _ = quantised(load_weights(directory, config), quantization)
    return TorchRunner(config, weights, BLOCKS, CONTEXT, kv_dtype=kv_dtype)


def one_device(directory: Path, device: str = "cpu") -> CudaRunner:
    """A saved model with the kernels for devices, which are interpreted on a CPU."""
    from backend.runners.cuda.runner import CudaRunner  # interprets if a test of the backend has said so

    config = model_config(directory)
    return CudaRunner(config, load_weights(directory, config), BLOCKS, CONTEXT, BATCH, torch.float32, device)


@contextmanager
def many_ranks(
    directory: Path,
    tensor: int,
    stages: int = 1,
    quantization: Quantization = "none",
    kv_dtype: KvDtype = "auto",
    devices: DeviceSettings | None = None,
) -> Iterator[ParallelRunner]:
    """The same on ``tensor * stages`` ranks."""
    config = model_config(directory)
    parts = partition(config, tensor, stages)
    settings = ParallelSettings(parts, quantization, "float32", kv_dtype, BLOCKS, CONTEXT, threads=1, devices=devices)
    runner = ParallelRunner(
        config, directory, settings, lambda part: load_part(directory, config, part, quantization)[0]
    )
    try:
        yield runner
    finally:
        runner.close()


def continued(runner: ModelRunner, prompt: Any, count: int) -> list[int]:
    """The greedy continuation of a prompt, token by token."""
    sequence = Paged(prompt, list(range(BLOCKS)))
    logits = runner.run(step_of([(sequence, len(prompt))])).logits
    tokens: list[int] = []
    while True:
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) == count:
            return tokens
        sequence.tokens = torch.cat([torch.from_numpy(sequence.tokens), torch.tensor(tokens[-1:])]).int().numpy()
        logits = runner.run(step_of([(sequence, 1)])).logits
