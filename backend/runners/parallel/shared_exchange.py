"""Sums and gatherings over the ranks of a stage by shared memory, which gloo takes 15 to 40 times as long for."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence

import torch

_SLOT_BYTES = 2**20
"""Of a tensor, at once."""
_LINE = 64
"""Bytes; each rank's number has a cache line of its own."""
_HEAD_BYTES = 4096
_SPIN_SECONDS = 100e-6
"""For which a rank looks without a pause, as the others mostly arrive at the same time; then it lets other threads run
between two looks."""


def is_ordered() -> bool:
    """Whether what a process writes is seen in this order by others without further instructions, as on x86."""
    return platform.machine().lower() in ("x86_64", "amd64")


def size_of(ranks: int) -> int:
    """Bytes that the ranks of one stage need."""
    return _HEAD_BYTES + 2 * ranks * _SLOT_BYTES


class Unanswered(Exception):
    """A rank has not arrived at an operation."""


class SharedExchange:
    """Joins tensors of all ranks of a stage. One thread calls it in each, and all in the same order.

    Each rank writes its tensor to a slot of its own, then the number of the operation, and waits for that number of the
    others. It has two slots, used in turn: whoever writes to one again has seen the numbers of the operation between,
    so all have read it.

    Args:
        memory: uint8 [`size_of(ranks)`], zeros at first, the same in all ranks.
        deadline: seconds to wait for another rank.
    """

    def __init__(self, memory: torch.Tensor, rank: int, ranks: int, deadline: float) -> None:
        self._slots = memory[_HEAD_BYTES:].view(2, ranks, _SLOT_BYTES)
        self._numbers = memory[:_HEAD_BYTES].numpy().data.cast("q")
        self._rank = rank
        self._others = [_LINE // 8 * other for other in range(ranks) if other != rank]
        self._own = _LINE // 8 * rank
        self._deadline = deadline
        self._number = 0
        self._aborted = False

    def add(self, addend: torch.Tensor) -> None:
        """Replaces a contiguous tensor by the sum, added in the order of the ranks: the same bits in each of them.

        Raises:
            Unanswered: a rank does not arrive, or ``abort`` was called.
        """
        flat = addend.view(-1)
        count = _SLOT_BYTES // addend.element_size()
        for start in range(0, len(flat), count):
            part = flat[start : start + count]
            addends = self._exchanged(part)[:, : part.nbytes].view(part.dtype)
            torch.add(addends[0], addends[1], out=part)
            for more in addends[2:]:
                part.add_(more)

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """The parts of all ranks [R, widths[rank]] side by side, [R, sum of widths]: for rank 0 alone.

        Raises as `add`.
        """
        flat = part.reshape(-1)
        parts = [part.new_empty(len(part) * width) for width in widths] if self._rank == 0 else []
        count = _SLOT_BYTES // part.element_size()
        for start in range(0, len(part) * max(widths), count):
            slots = self._exchanged(flat[start : start + count])
            for rank, whole in enumerate(parts):
                piece = whole[start : start + count]
                piece.copy_(slots[rank, : piece.nbytes].view(piece.dtype))
        if not parts:
            return None
        return torch.cat([whole.view(len(part), width) for whole, width in zip(parts, widths, strict=True)], dim=1)

    def abort(self) -> None:
        """Ends a wait, now or later, in any thread."""
        self._aborted = True

    def _exchanged(self, own: torch.Tensor) -> torch.Tensor:
        """Slots of all ranks, uint8 [ranks, bytes], with what each has given; valid until the next but one."""
        self._number += 1
        slots = self._slots[self._number % 2]
        slots[self._rank, : own.nbytes].view(own.dtype).copy_(own)
        self._numbers[self._own] = self._number
        for other in self._others:
            self._wait(other)
        return slots

    def _wait(self, other: int) -> None:
        if self._numbers[other] >= self._number:
            return
        began = time.perf_counter()
        while self._numbers[other] < self._number:
            waited = time.perf_counter() - began
            if waited < _SPIN_SECONDS:
                continue
            if self._aborted:
                raise Unanswered("an operation was given up")
            if waited > self._deadline:
                raise Unanswered(f"a rank has not arrived at an operation within {self._deadline:g} s")
            time.sleep(0)
