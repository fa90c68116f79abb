"""What says that there is too little memory, and what is another failure."""

from __future__ import annotations

import pytest
import torch

from backend.errors import is_out_of_memory


def test_an_allocation_that_cannot_be_is_known() -> None:
    """torch's own allocator raises no class of its own for it."""
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**50, dtype=torch.float64)
    with pytest.raises(MemoryError) as of_python:
        bytearray(2**60)
    assert is_out_of_memory(of_torch.value)
    assert is_out_of_memory(of_python.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))


def test_other_failures_are_not_taken_for_it() -> None:
    """They would be shed as one step too many, or shown without a trace."""
    with pytest.raises(RuntimeError) as wrong:
        torch.ones(2) @ torch.ones(3)
    assert not is_out_of_memory(wrong.value)
