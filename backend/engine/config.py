"""Limits and scheduling policy of an engine, parsed once and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

from backend.models.config import KvDtype
from backend.quantized_weights.names import Quantization
from prefix_store.store.config import StoreConfig

Device = Literal["auto", "cpu", "cuda"]
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]
SchedulingPolicy = Literal["fcfs", "priority"]


class BatchingMode(Enum):
    """How batches form."""

    CONTINUOUS = "continuous"
    """Sequences join and leave between any two steps (iteration-level scheduling: Orca, OSDI 2022)."""
    DYNAMIC = "dynamic"
    """A batch begins when it is full, or when its first sequence has waited long enough; nobody joins it later."""
    STATIC = "static"
    """A batch takes what is waiting when the last one has ended; nobody joins it later."""


@dataclass(frozen=True, slots=True)
class Batching:
    """The rule by which waiting sequences join."""

    mode: BatchingMode = BatchingMode.CONTINUOUS
    max_wait: float = 0.0
    """Seconds for which a dynamic batch waits to be full."""

    @property
    def admits_while_running(self) -> bool:
        """Whether a sequence that does not join now may still join while others run."""
        return self.mode is BatchingMode.CONTINUOUS

    def seconds_until_admission(self, running: int, waiting: int, waited: float, max_batch: int) -> float | None:
        """Seconds until waiting sequences may join; 0: now, None: not before something else happens.

        Args:
            running: sequences in the batch.
            waiting: sequences queued, at least 1.
            waited: seconds for which the first of them has been queued.
        """
        if self.admits_while_running:
            return 0.0
        if running:
            return None
        if self.mode is BatchingMode.STATIC or waiting >= max_batch:
            return 0.0
        return max(0.0, self.max_wait - waited)


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
    batching: Batching = Batching(BatchingMode.CONTINUOUS)
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
