"""What the memory is taken by: weights, KV blocks, what steps need beside them, and the rest of the process.

On a CPU the pages that are really there count, from ``/proc/self``: ``pagemap`` for those of a tensor, the peak of the
resident set for the process. What a run needs at its peak beyond weights and KV blocks are activations, logits, and
the buffers that allocators keep for them. On a CUDA device the figures are those of torch's allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner
from backend.model import ServedModel
from backend.models.sizes import count_parameters
from backend.runners.fused.runner import FusedRunner

_STATUS, _PAGEMAP, _CLEAR = Path("/proc/self/status"), Path("/proc/self/pagemap"), Path("/proc/self/clear_refs")
_ENTRY = 8
"""Bytes of a page's entry in ``pagemap``, of which the highest bit says that the page is there."""
_PRESENT = np.uint64(1 << 63)
_RESET_PEAK = "5"

Range = tuple[int, int]
"""First address, and bytes."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by part; ``weights``, ``kv_there``, ``activations`` and ``rest`` add up to ``total``."""

    where: str
    weights: int
    kv_allocated: int
    kv_there: int
    """Of the allocated ones, those that have pages: a CPU gives them at the first use."""
    kv_in_use: int
    """Held by sequences at the peak."""
    activations: int
    """Peak of what steps need beyond these, and of what requests hold meanwhile."""
    rest: int
    """Interpreter, libraries, tokenizer and requests; on a device what the allocator keeps."""
    total: int
    """Peak of the process, or of the device's allocator."""


def is_on_cuda(runner: ModelRunner) -> bool:
    """Whether a CUDA device computes."""
    return any(tensor.is_cuda for tensor in tensors_of(runner))


def read_bytes(model: ServedModel) -> int:
    """Bytes of the weights that products read in a step: the matrices and the head, with their scales."""
    runner, config = model.runner, model.config
    if isinstance(runner, FusedRunner):
        return sum(runner.weight_bytes.values())
    held = sum(size for _, size in _weight_ranges(runner))
    # The embedding is only looked up, unless it is the head too.
    if config.tie_word_embeddings and model.quantization is None:
        return held
    itemsize = 4 if runner.weights_precision == "float32" else 2
    return held - count_parameters(config).embedding * itemsize


class MemoryWatch:
    """Observes one run of a runner; make it before the runner's first step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._block_bytes = runner.kv_bytes_per_token * BLOCK_SIZE
        self._weights = _weight_ranges(runner)
        self._on_cuda = is_on_cuda(runner)
        self._kv = [] if self._on_cuda else _kv_ranges(runner)
        if self._on_cuda:
            self._before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # what was freed while the model was loaded: glibc alone
            ctypes.CDLL(None).malloc_trim(0)
        # A container may forbid it: then the peak is that since the start, loading included.
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
        self._before = _status("VmRSS") - _there(self._weights) - _there(self._kv)

    def memory(self, held_blocks: int) -> Memory:
        """The memory until now; ``held_blocks`` is the most that sequences have held."""
        allocated = self._runner.num_blocks * self._block_bytes
        in_use = held_blocks * self._block_bytes
        if self._on_cuda:
            weights = sum(size for _, size in self._weights)
            activations = torch.cuda.max_memory_allocated() - self._before
            total = torch.cuda.max_memory_reserved()
            rest = total - weights - allocated - activations
            return Memory(torch.cuda.get_device_name(), weights, allocated, allocated, in_use, activations, rest, total)
        weights, kv_there = _there(self._weights), _there(self._kv)
        total = max(_status("VmHWM"), _status("VmRSS"))
        activations = max(0, total - weights - kv_there - self._before)
        rest = max(0, total - weights - kv_there - activations)
        return Memory("this process", weights, allocated, kv_there, in_use, activations, rest, total)


def tensors_of(holder: object) -> Iterator[torch.Tensor]:
    """All tensors that an object of this package holds, however deep."""
    seen: set[int] = set()
    left: list[object] = [holder]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif type(one).__module__.startswith("backend."):
            left += getattr(one, "__dict__", {}).values()
            if dataclasses.is_dataclass(one):
                left += [getattr(one, field.name) for field in dataclasses.fields(one)]


def _weight_ranges(runner: ModelRunner) -> list[Range]:
    """Memory of the tensors that a runner holds, without that of its KV blocks."""
    storages = {(storage.data_ptr(), storage.nbytes()) for storage in (t.untyped_storage() for t in tensors_of(runner))}
    if any(tensor.is_cuda for tensor in tensors_of(runner)):
        # The KV blocks are one allocation, which nothing else is as large as.
        blocks = runner.num_blocks * runner.kv_bytes_per_token * BLOCK_SIZE
        return [(address, size) for address, size in storages if size < blocks]
    kv = _kv_ranges(runner)
    return [
        (address, size)
        for address, size in storages
        if size and not any(first <= address < first + length for first, length in kv)
    ]


def _kv_ranges(runner: ModelRunner) -> list[Range]:
    """Memory of the KV blocks, where the processor sees it."""
    blocks = runner.kv_blocks
    ends = None if blocks is None else blocks.outgoing([0, runner.num_blocks - 1])
    if ends is None:
        return []
    ranges = []
    for first, last in zip(*ends.ready(), strict=True):
        begin, _ = np.lib.array_utils.byte_bounds(np.asarray(first))
        _, end = np.lib.array_utils.byte_bounds(np.asarray(last))
        ranges.append((begin, end - begin))
    ends.close()
    return ranges


def _there(ranges: list[Range]) -> int:
    """Bytes of these that have a page; all of them where the system does not tell."""
    page = mmap.PAGESIZE
    pages = 0
    try:
        with _PAGEMAP.open("rb", buffering=0) as entries:
            for address, size in ranges:
                first, last = address // page, (address + size - 1) // page
                entries.seek(first * _ENTRY)
                found = np.frombuffer(entries.read((last - first + 1) * _ENTRY), dtype=np.uint64)
                pages += int(np.count_nonzero(found & _PRESENT))
    except OSError:
        return sum(size for _, size in ranges)
    return pages * page


def _status(field: str) -> int:
    """A size of ``/proc/self/status`` in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
