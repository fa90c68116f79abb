"""Memory in huge pages: a step reads all weights, and with pages of 4 KiB the TLB misses cost time.

Linux provides them on request (madvise) where /sys/kernel/mm/transparent_hugepage/enabled says ``madvise`` or
``always``. Elsewhere this is ordinary memory.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

_CHUNK = 64 << 20
_LINE = 64  # bytes of a cache line, and of the widest vector


def zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], zeros. Raises OSError (ENOMEM) if there is not enough memory."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Arena:
    """Copies of tensors, one after the other; they live as long as the arena."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._used = 0

    def copy(self, tensor: torch.Tensor) -> int:
        """Copies a tensor and returns its address, aligned to a cache line. Raises OSError as ``zeros``."""
        content = tensor.contiguous().view(-1).view(torch.uint8)
        size = content.numel()
        if not self._chunks or self._used + size > self._chunks[-1].numel():
            self._chunks.append(zeros(max(_CHUNK, size)))
            self._used = 0
        place = self._chunks[-1][self._used : self._used + size]
        place.copy_(content)
        self._used += -(-size // _LINE) * _LINE
        return place.data_ptr()
