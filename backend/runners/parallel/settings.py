"""How a model is computed by several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backend.models.config import KvDtype
from backend.models.partition import ModelPart
from backend.quantized_weights.names import Quantization


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """Of ranks that compute with the CUDA runner."""

    kind: Literal["cuda", "cpu"]
    """cuda: rank n is on the device with that number. cpu: all are on the processor, where kernels are interpreted."""
    kv_memory: int | None
    """Bytes for the KV blocks of the whole model; None: most of what is free on the device where the fewest fit."""
    max_batch: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class ParallelSettings:
    """How a model is computed by several ranks.

    Args:
        quantization: what each rank rounds its weights to.
        dtype: torch's name of the dtype of computation.
        num_blocks: KV blocks; None: as many as the ``devices`` hold.
        threads: that compute in each rank.
        micro_batch_rows: fewest rows of the micro-batches by which stages work at once; fewer take about as long, for
            the weights have to be read for them all the same.
        devices: for the CUDA runner; None: ranks compute with torch on the CPU.
    """

    parts: tuple[ModelPart, ...]
    quantization: Quantization
    dtype: str
    kv_dtype: KvDtype
    num_blocks: int | None
    max_context: int
    threads: int
    micro_batch_rows: int = 16
    devices: DeviceSettings | None = None

    @property
    def is_on_devices(self) -> bool:
        """Whether each rank has a device."""
        return self.devices is not None and self.devices.kind == "cuda"

    def device_of(self, rank: int) -> str:
        """torch's name of where a rank computes."""
        return f"cuda:{rank}" if self.is_on_devices else "cpu"
