"""Collective operations among the ranks of one engine: torch.distributed, and shared memory where it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Store

from backend.models.partition import ModelPart
from backend.runners.parallel.shared_exchange import SharedExchange, Unanswered, is_ordered

_TIMEOUT = timedelta(seconds=60)
"""Of one operation. Ranks that are dead or stopped are noticed sooner, by whoever watches them; this ends the wait for
one that goes on and never arrives."""
_LOOPBACK = "127.0.0.1"


class PeerLost(Exception):
    """Another rank has not taken part in an operation; the message is torch's."""


class Communicator:
    """Connects a rank with the others, on this host alone. One thread calls it, and all ranks in the same order.

    Args:
        rendezvous: a file that does not exist, or that other ranks of the same engine have made.
        shared: uint8, what the ranks of the stage share, as `SharedExchange` wants it.

    Raises:
        PeerLost: another rank does not connect.
    """

    def __init__(self, part: ModelPart, rendezvous: Path, shared: torch.Tensor) -> None:
        self._part = part
        ranks = part.stages * part.tensor_ranks
        with _peer_lost():
            store = FileStore(str(rendezvous), ranks)
            store.set_timeout(_TIMEOUT)
            self._all = _group(store, "all", part.rank, ranks)
            self._stage = self._shared = None
            if part.tensor_ranks > 1 and is_ordered():
                self._shared = SharedExchange(shared, part.tensor_rank, part.tensor_ranks, _TIMEOUT.total_seconds())
            elif part.tensor_ranks > 1:
                self._stage = _group(store, f"stage {part.stage}", part.tensor_rank, part.tensor_ranks)

    def sum(self, addend: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of the stage, in the place of the addend; the same bits in each of them.

        Raises:
            PeerLost: a rank of the stage does not take part.
        """
        addend = addend.contiguous()
        with _peer_lost():
            if self._shared is not None:
                self._shared.add(addend)
            elif self._stage is not None and addend.numel():
                self._stage.allreduce([addend]).wait()
        return addend

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """The parts of the ranks of the stage [R, widths[rank]] side by side, for its first rank alone.

        Raises as `sum`.
        """
        if len(widths) == 1:
            return part
        if self._shared is not None:
            with _peer_lost():
                return self._shared.gather(part, widths)
        first, own = self._part.rank - self._part.tensor_rank, self._part.tensor_rank
        if own:
            self.send(part, first)()
            return None
        others = [
            self.receive((len(part), width), part.dtype, first + rank) for rank, width in enumerate(widths[1:], start=1)
        ]
        return torch.cat([part, *others], dim=1)

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Begins to send a tensor; what it returns waits until it has been taken, and raises as `sum` does."""
        tensor = tensor.contiguous()
        if not tensor.numel():
            return lambda: None
        with _peer_lost():
            work = self._all.send([tensor], rank, 0)

        def wait() -> None:
            with _peer_lost():
                work.wait()
            del tensor_held[:]

        tensor_held = [tensor]
        return wait

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
        """A tensor that another rank sends; its rank sends in the same order as this one receives. Raises as `sum`."""
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            with _peer_lost():
                self._all.recv([tensor], rank, 0).wait()
        return tensor

    def abort(self) -> None:
        """Ends the wait for a sum of another thread with PeerLost: a rank is known to be lost."""
        if self._shared is not None:
            self._shared.abort()

    def close(self) -> None:
        """Ends the connections; others that wait for this rank to send or to receive get PeerLost."""
        for group in (self._all, self._stage):
            if group is not None:
                group.abort()


def _group(store: Store, name: str, rank: int, size: int) -> Any:
    # torch publishes no types for the options. Without a device of its own it asks what the host's name resolves to.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = _TIMEOUT
    return ProcessGroupGloo(PrefixStore(name, store), rank, size, options)


@contextmanager
def _peer_lost() -> Iterator[None]:
    """torch raises RuntimeError for a connection that is closed, refused or too slow."""
    try:
        yield
    except (RuntimeError, Unanswered) as error:
        raise PeerLost(str(error).partition("\n")[0]) from error
