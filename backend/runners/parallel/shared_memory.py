"""Memory that the ranks of one engine share, by a file descriptor that is inherited."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile

import torch


def create(size: int) -> int:
    """A descriptor of ``size`` bytes of zeros that no path leads to; the caller closes it.

    Raises:
        OSError: there is not so much.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create("keepgate-kv", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def attach(descriptor: int) -> torch.Tensor:
    """The memory as uint8 [bytes]; what one process writes the others see. It is unmapped when the tensor is freed."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
