"""Copies small arrays from the host to a device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[np.int32] | npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """A copy of the array on the device, ordered before what is launched next; the host does not wait for it.

    torch keeps the pinned memory of such a copy until it is done.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()
