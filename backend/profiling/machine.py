"""What this machine reaches at best, measured now: bytes a second from memory, and operations a second in a product.

Both are measured with torch, with as many threads as the engine has, twice after the run; the better counts, for other
programs only slow them down.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_TURNS = 5
_SMALLEST, _LARGEST = 16 * 2**20, 2**30
_CPU_ROWS, _CUDA_ROWS = 1536, 8192
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Machine:
    """The roof of a roofline."""

    device: str
    threads: int
    bytes_per_second: float
    """The better of reading a tensor and of copying it, which reads and writes."""
    flops_per_second: float
    """Of a product of square matrices in ``dtype``."""
    dtype: str
    buffer_bytes: int
    """What was read: as much as a step reads, so that caches help as much as they help a step."""

    def better(self, other: Machine) -> Machine:
        """The better of both measurements."""
        return Machine(
            self.device,
            self.threads,
            max(self.bytes_per_second, other.bytes_per_second),
            max(self.flops_per_second, other.flops_per_second),
            self.dtype,
            self.buffer_bytes,
        )


def measure(step_bytes: int, precision: str, device: str) -> Machine:
    """Measures for about a second.

    Args:
        step_bytes: what a step reads.
        precision: of the weights. A CPU multiplies in float32, whatever they are stored in.
        device: "cpu" or "cuda".
    """
    dtype = _DTYPES.get(precision, torch.bfloat16) if device == "cuda" else torch.float32
    with torch.inference_mode():
        source = torch.ones(min(_LARGEST, max(_SMALLEST, step_bytes)) // 4, device=device)
        copy = torch.empty_like(source)
        rows = _CUDA_ROWS if device == "cuda" else _CPU_ROWS
        matrix = torch.full((rows, rows), 0.5, device=device, dtype=dtype)
        read = source.nbytes / _seconds(source.sum, device)
        copied = 2 * source.nbytes / _seconds(lambda: copy.copy_(source), device)
        flops = 2 * rows**3 / _seconds(lambda: matrix @ matrix, device)
    return Machine(
        torch.cuda.get_device_name() if device == "cuda" else "CPU",
        torch.get_num_threads(),
        max(read, copied),
        flops,
        str(dtype).removeprefix("torch."),
        source.nbytes,
    )


class ProcessorUse:
    """How many processors are used from the making of this on, here and by all other programs of the host."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._own, self._all = _own_seconds(), _busy_seconds()

    def until_now(self) -> tuple[float, float]:
        """Means: (processors that this process used, those that others used)."""
        passed = time.monotonic() - self._began
        own = (_own_seconds() - self._own) / passed
        return own, max(0.0, (_busy_seconds() - self._all) / passed - own)


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _busy_seconds() -> float:
    """Seconds of all processors that were not idle, since the system's start."""
    user, nice, system, _idle, _waiting, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")


def _seconds(work: Callable[[], object], device: str) -> float:
    """The shortest of a few turns, after one that warms up."""
    taken = []
    for _ in range(_TURNS + 1):
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])
