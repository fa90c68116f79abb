"""Tensors in the arena keep their addresses and contents."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.runners.fused import huge_pages
from backend.runners.fused.huge_pages import Arena, zeros

DTYPES = st.sampled_from([torch.uint8, torch.float16, torch.float32])


@given(shapes=st.lists(st.tuples(DTYPES, st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=20))
def test_every_tensor_is_at_its_address(shapes: list[tuple[torch.dtype, int, int]]) -> None:
    """Each tensor is contiguous at its address, aligned to a cache line, without overlap."""
    arena = Arena()
    tensors = [(torch.rand(columns, rows).T * 200).to(dtype) for dtype, rows, columns in shapes]
    addresses = [arena.copy(tensor) for tensor in tensors]

    for tensor, address in zip(tensors, addresses, strict=True):
        assert address % 64 == 0
        kept = ctypes.string_at(address, tensor.numel() * tensor.element_size())
        assert kept == tensor.contiguous().numpy().tobytes()


def test_a_tensor_larger_than_a_chunk_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than a chunk gets a chunk of its own, and chunks are filled to the last byte."""
    # A chunk is many megabytes, and no option.
    monkeypatch.setattr(huge_pages, "_CHUNK", 256)
    arena = Arena()
    tensors = [
        torch.full((size,), value, dtype=torch.uint8)
        for value, size in enumerate((100, 5000, 100, 100, 100, 128, 129, 100, 129), 1)
    ]
    addresses = [arena.copy(tensor) for tensor in tensors]

    for tensor, address in zip(tensors, addresses, strict=True):
        assert ctypes.string_at(address, tensor.numel()) == tensor.numpy().tobytes()
    assert addresses[5] == addresses[4] + 128


def test_memory_is_zeros_in_huge_pages_where_the_system_has_them() -> None:
    """`zeros` gives zeroed memory that is in huge pages where the system has them."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    memory = zeros(64 << 20)

    assert memory.shape == (64 << 20,)
    assert not memory.any()
    memory.fill_(1)
    if enabled.exists() and "[never]" not in enabled.read_text():
        assert _huge_kib(memory.data_ptr()) >= 32 << 10


def _huge_kib(address: int) -> int:
    """KiB in huge pages of the mapping that holds the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return 0
