"""Errors that mean too little memory are told from other failures."""

from __future__ import annotations

import pytest
import torch

from backend.errors import is_out_of_memory


def test_failed_allocations_are_out_of_memory() -> None:
    """Failed allocations of torch and Python are recognised, even torch's on a CPU, which have no own class."""
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**50, dtype=torch.float64)
    with pytest.raises(MemoryError) as of_python:
        bytearray(2**60)
    assert is_out_of_memory(of_torch.value)
    assert is_out_of_memory(of_python.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))


def test_other_failures_are_not_out_of_memory() -> None:
    """Other runtime errors are not recognised as a lack of memory."""
    with pytest.raises(RuntimeError) as wrong:
        torch.ones(2) @ torch.ones(3)
    assert not is_out_of_memory(wrong.value)
