"""Memory in huge pages: a step reads all weights, and with pages of 4 KiB it waits for the page table, too.

Linux gives them to those who ask (madvise), where /sys/kernel/mm/transparent_hugepage/enabled says ``madvise`` or
``always``. Elsewhere this is memory like any other.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

_CHUNK = 64 << 20
_LINE = 64  # bytes of a cache line, and of the widest vector


def zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], zeros. Raises OSError (ENOMEM) when there is no room."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Arena:
    """Copies of tensors, one after the other in the order in which they came, for as long as the arena lives."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._used = 0

    def keep(self, tensor: torch.Tensor) -> int:
        """Copies a tensor and returns the address, which is a multiple of a cache line. Raises OSError as ``zeros``."""
        content = tensor.contiguous().view(-1).view(torch.uint8)
        size = content.numel()
        if not self._chunks or self._used + size > self._chunks[-1].numel():
            self._chunks.append(zeros(max(_CHUNK, size)))
            self._used = 0
        place = self._chunks[-1][self._used : self._used + size]
        place.copy_(content)
        self._used += -(-size // _LINE) * _LINE
        return place.data_ptr()
