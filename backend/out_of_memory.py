"""Whether an exception says that there is too little memory, of the machine or of a device."""

from __future__ import annotations

OUT_OF_MEMORY = "there is not enough memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Of the classes that Python and torch have for it, or the plain RuntimeError that torch's CPU allocator raises."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
