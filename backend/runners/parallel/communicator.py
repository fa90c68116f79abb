"""Collective operations among the ranks of one engine: torch.distributed, and shared memory where it can."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, ReduceOp

from backend.models.partition import ModelPart
from backend.runners.parallel.process_group import TIMEOUT, GroupExchange, process_group
from backend.runners.parallel.shared_exchange import SharedExchange, Unanswered, is_ordered

_CPU = torch.device("cpu")
_LOOK_SECONDS = 50e-6
"""Between two looks whether a device is done; a step takes milliseconds."""


class PeerLost(Exception):
    """Another rank has not taken part in an operation; the message is torch's."""


class Communicator:
    """Connects a rank with the others, on this host alone. One thread calls it, and all ranks in the same order.

    On a device no operation but `finish` waits for the others: the device does. The first one of a group waits for all
    of its ranks, without a deadline.

    Args:
        rendezvous: a file that does not exist, or that other ranks of the same engine have made.
        device: where the tensors are that ranks exchange.
        shared: uint8, what the ranks of the stage share, as `SharedExchange` wants it; None: they share nothing.

    Raises:
        PeerLost: another rank does not connect, or what they exchange does not arrive.
    """

    def __init__(
        self, part: ModelPart, rendezvous: Path, device: torch.device = _CPU, shared: torch.Tensor | None = None
    ) -> None:
        self._part = part
        self._device = device
        self._aborted = False
        self._groups: list[Any] = []
        self._device_groups: list[Any] = []
        self._stage: SharedExchange | GroupExchange | None = None
        ranks = part.stages * part.tensor_ranks
        with _peer_lost():
            store = FileStore(str(rendezvous), ranks)
            store.set_timeout(TIMEOUT)

            def group(name: str, rank: int, size: int, where: torch.device) -> Any:
                made = process_group(store, name, rank, size, where)
                (self._groups if where.type == "cpu" else self._device_groups).append(made)
                return made

            self._all = group("all", part.rank, ranks, _CPU)
            # Numbers of the host stay with gloo, whose operations end when another rank does.
            self._tensors = self._all if device.type == "cpu" else group("devices", part.rank, ranks, device)
            if part.tensor_ranks > 1 and shared is not None and is_ordered():
                self._stage = SharedExchange(shared, part.tensor_rank, part.tensor_ranks, TIMEOUT.total_seconds())
            elif part.tensor_ranks > 1:
                own = group(f"stage {part.stage}", part.tensor_rank, part.tensor_ranks, device)
                self._stage = GroupExchange(own, part.tensor_rank)
        if device.type == "cuda":
            self._check_sum()
        self._check_links()
        self.finish()

    def sum(self, addend: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of the stage, in the place of the addend; the same bits in each of them.

        Raises:
            PeerLost: a rank of the stage does not take part.
        """
        addend = addend.contiguous()
        if self._stage is not None:
            with self._operation():
                self._stage.add(addend)
        return addend

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """The parts of the ranks of the stage [R, widths[rank]] side by side, for its first rank alone.

        Raises as `sum`.
        """
        if self._stage is None:
            return part
        with self._operation():
            return self._stage.gather(part, widths)

    def least(self, number: int) -> int:
        """The least of the numbers of all ranks. Raises as `sum`."""
        numbers = torch.tensor([number])
        with self._operation():
            self._all.allreduce([numbers], ReduceOp.MIN).wait()
        return int(numbers)

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Begins to send a tensor; what it returns waits until it has been taken, and raises as `sum` does.

        Between two ranks of devices one thing is sent after the other, in either direction.
        """
        tensor = tensor.contiguous()
        if not tensor.numel():
            return lambda: None
        with self._operation():
            work = self._tensors.send([tensor], rank, 0)

        def wait() -> None:
            with self._operation():
                work.wait()
            del tensor_held[:]

        tensor_held = [tensor]
        return wait

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
        """A tensor that another rank sends; its rank sends in the same order as this one receives. Raises as `sum`."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if tensor.numel():
            with self._operation():
                self._tensors.recv([tensor], rank, 0).wait()
        return tensor

    def finish(self) -> None:
        """Waits until the device has computed all that was launched; on a CPU everything is.

        Raises:
            PeerLost: it waits for a rank that does not take part.
            RuntimeError: the device has failed.
        """
        if self._device.type != "cuda":
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's own gap
        done.record()
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while not done.query() and not self._aborted:  # type: ignore[no-untyped-call] # torch's own gap
            if time.monotonic() > deadline:
                raise PeerLost(f"a step has not ended within {TIMEOUT.total_seconds():g} s")
            time.sleep(_LOOK_SECONDS)
        if self._aborted:  # what was computed is of operations that have been given up
            raise PeerLost("a step was given up")

    def abort(self) -> None:
        """Ends the waits of another thread with PeerLost, and those of the device: a rank is known to be lost."""
        self._aborted = True
        if isinstance(self._stage, SharedExchange):
            self._stage.abort()
        # Apart, for NCCL waits until no graph is left in which it was recorded. Each thread keeps its group alive: what
        # frees one that is not aborted would wait likewise.
        groups, self._device_groups = self._device_groups, []
        for group in groups:
            threading.Thread(target=group.abort, name="nccl-abort", daemon=True).start()

    def close(self) -> None:
        """Ends the connections; others that wait for this rank to send or to receive get PeerLost."""
        self.abort()
        for group in self._groups:
            group.abort()

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """One with other ranks. None begins after `abort`: it would wait for a lock that NCCL holds meanwhile."""
        if self._aborted:
            raise PeerLost("an operation was given up")
        with _peer_lost():
            yield

    def _check_sum(self) -> None:
        """A first sum among devices: connections between them that do not work are noticed here."""
        total = self.sum(torch.ones(1, device=self._device))
        self.finish()
        if int(total) != self._part.tensor_ranks:
            raise PeerLost(f"the sum of {self._part.tensor_ranks} ones over NCCL is {int(total)}")

    def _check_links(self) -> None:
        """A first number from each stage to the next one, and from the last one to rank 0; see `_check_sum`."""
        part = self._part
        last = part.tensor_ranks * (part.stages - 1)
        if part.stages == 1:
            return
        own = torch.full((1,), part.rank, device=self._device)
        if not part.is_first:
            self._check_sent(part.rank - part.tensor_ranks)
        if not part.is_last:
            self.send(own, part.rank + part.tensor_ranks)()
        elif part.rank == last:
            self.send(own, 0)()
        if part.rank == 0:
            self._check_sent(last)

    def _check_sent(self, rank: int) -> None:
        got = self.receive((1,), torch.int64, rank)
        self.finish()
        if int(got) != rank:
            raise PeerLost(f"rank {rank} has sent its number, and {int(got)} has arrived")


@contextmanager
def _peer_lost() -> Iterator[None]:
    """torch raises RuntimeError for a connection that is closed, refused or too slow; NCCL's own reason comes last."""
    try:
        yield
    except (torch.cuda.OutOfMemoryError, torch.AcceleratorError):  # of this rank's device
        raise
    except (RuntimeError, Unanswered) as error:
        text = str(error)
        raise PeerLost((text.partition("Last error:")[2].strip() or text).partition("\n")[0]) from error
