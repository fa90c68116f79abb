"""How an engine runs a model, parsed once and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backend.engine.batching import Batching, BatchingMode
from backend.models.config import KvDtype
from backend.quantized_weights.names import Quantization
from prefix_store.store.config import StoreConfig

Device = Literal["auto", "cpu", "cuda"]
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]
SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Memory is in bytes, the rest in tokens, sequences or threads."""

    kv_memory: int | None = None
    """None: 512 MiB on a CPU, most of what the weights leave free on a CUDA device."""
    max_batch: int | None = None
    """None: what suits the runner."""
    max_context: int | None = None
    """None: what the model was made for, or what the KV memory holds if that is less."""
    step_tokens: int | None = None
    """Tokens computed in one step at most: the fewer, the less a long prompt delays running answers. None: what suits
    the runner."""
    max_waiting: int = 256
    """Sequences admitted to the queue beyond ``max_batch``."""
    max_seconds: float | None = None
    """What a request may take, waiting included, before it is ended; None: as long as it lasts."""
    batching: Batching = Batching(BatchingMode.CONTINUOUS)  # noqa: RUF009 - frozen
    scheduling_policy: SchedulingPolicy = "priority"
    """Who goes first: who came first (fcfs), or whose request has the smaller ``priority``."""
    shares_prefixes: bool = True
    """Whether sequences use KV blocks that others have computed."""
    threads: int = 1
    kv_dtype: KvDtype = "auto"
    """How keys and values are stored; auto: as they are computed."""
    quantization: Quantization = "none"
    """In what the weights are kept; none: as they are in the model's files."""
    dtype: ComputeDtype = "auto"
    """What is computed in; auto: the runner's own choice."""
    device: Device = "auto"
    """What computes; auto: a CUDA device that can, else the CPU."""
    prefix_store: StoreConfig | None = None
    """Where KV blocks are kept beyond the engine's memory; None: nowhere."""
    public_prefixes: tuple[Path, ...] = ()
    """Files with beginnings of prompts whose KV blocks all tenants share."""
