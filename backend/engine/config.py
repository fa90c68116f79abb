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
    """When waiting sequences may join the batch."""

    CONTINUOUS = "continuous"
    """Sequences join and leave between any two steps (iteration-level scheduling: Orca, OSDI 2022)."""
    DYNAMIC = "dynamic"
    """A batch starts when it is full or its first sequence has waited ``max_wait``; no sequence joins it later."""
    STATIC = "static"
    """A batch takes all waiting sequences when the last one has ended; no sequence joins it later."""


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
    """None: the runner's default."""
    max_context: int | None = None
    """None: the model's maximum, or what the KV memory holds if that is less."""
    step_tokens: int | None = None
    """Tokens computed in one step at most: the fewer, the less a long prompt delays running answers. None: what suits
    the runner."""
    max_waiting: int = 256
    """Sequences admitted to the queue beyond ``max_batch``."""
    max_seconds: float | None = None
    """Time limit of a request, waiting included; None: no limit."""
    batching: Batching = Batching(BatchingMode.CONTINUOUS)
    scheduling_policy: SchedulingPolicy = "priority"
    """Order of the queue: by arrival (fcfs), or by the request's ``priority``, smaller first."""
    kv_blocks: int | None = None
    """KV blocks to have, whatever memory they take; None: as many as ``kv_memory`` holds."""
    speculation: bool = True
    """Whether a step verifies drafts of the tokens to come, where that is expected to pay."""
    medusa: Path | None = None
    """Directory with Medusa's heads for the model; None: it has none."""
    draft_model: str = ""
    """Model with the same vocabulary that writes drafts; empty: they are only looked up."""
    shares_prefixes: bool = True
    """Whether sequences use KV blocks that others have computed."""
    threads: int = 1
    kv_dtype: KvDtype = "auto"
    """How keys and values are stored; auto: as they are computed."""
    quantization: Quantization = "none"
    """Quantisation of the weights; none: as in the model's files."""
    dtype: ComputeDtype = "auto"
    """Dtype of computation; auto: the runner's choice."""
    tensor_parallel: int = 1
    """Processes that divide each layer."""
    pipeline_parallel: int = 1
    """Stages of layers, each computed by ``tensor_parallel`` processes."""
    device: Device = "auto"
    """auto: a CUDA device if it can serve the model, else the CPU."""
    prefix_store: StoreConfig | None = None
    """Store of KV blocks beyond the engine's memory; None: there is none."""
    public_prefixes: tuple[Path, ...] = ()
    """Files with beginnings of prompts whose KV blocks all tenants share."""
    strict_fields: bool = False
    """Whether a request with a field that no API has is refused."""
    drop_images: bool = False
    """Whether parts of messages that are not text are left out; else they are refused."""
