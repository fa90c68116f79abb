"""Process groups of torch.distributed: NCCL among devices, gloo among processes on the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.nn import functional

TIMEOUT = timedelta(seconds=60)
"""Of one operation. Ranks that are dead or stopped are noticed sooner, by whoever watches them; this ends the wait for
one that goes on and never arrives."""
_LOOPBACK, _LOOPBACK_INTERFACE = "127.0.0.1", "=lo"


def process_group(store: Store, name: str, rank: int, size: int, device: torch.device) -> Any:
    """A group whose tensors are on such a device. All of its ranks are on this host, and only this host reaches it.

    Raises:
        RuntimeError: another rank does not connect.
    """
    prefixed = PrefixStore(name, store)
    if device.type == "cuda":
        return _nccl(prefixed, rank, size)
    # torch publishes no types for the options. Without a device of its own it asks what the host's name resolves to.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = TIMEOUT
    return ProcessGroupGloo(prefixed, rank, size, options)


def _nccl(store: Store, rank: int, size: int) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only builds for CUDA have it

    # torch would end this process when another one has gone, when an operation has failed on the device, or when its
    # watcher has waited for minutes; `RankProcesses` says which rank it was, and ends all of them.
    for what in ("ASYNC_ERROR_HANDLING", "RETHROW_CUDA_ERRORS", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
        os.environ[f"TORCH_NCCL_{what}"] = "0"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)


class GroupExchange:
    """Joins tensors of all ranks of a stage. One thread calls it in each, and all in the same order.

    On a device an operation is ordered before what is launched next, and a CUDA graph records it.

    Args:
        group: of the ranks of the stage.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._rank = rank

    def add(self, addend: torch.Tensor) -> None:
        """Replaces a contiguous tensor by the sum.

        Raises:
            RuntimeError: a rank does not take part.
        """
        if addend.numel():
            self._group.allreduce([addend]).wait()

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """The parts of all ranks [R, widths[rank]] side by side, [R, sum of widths]: for rank 0 alone.

        Raises as `add`.
        """
        # Of one size, as NCCL wants them: widths differ by one at most.
        padded = functional.pad(part, (0, max(widths) - part.shape[1])).contiguous()
        every = padded.new_empty(len(widths) * len(padded), padded.shape[1])
        if padded.numel():
            self._group._allgather_base(every, padded).wait()
        if self._rank:
            return None
        parts = every.view(len(widths), *padded.shape)
        return torch.cat([own[:, :width] for own, width in zip(parts, widths, strict=True)], dim=1)
