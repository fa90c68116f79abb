"""What a device is given to do: queues that each keep their order and otherwise run beside each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a queue; passed when all before it is done."""

    def passed(self) -> bool:
        """Whether it is; does not wait."""
        ...

    def wait(self) -> None:
        """Keeps the host, in any thread, until it is passed. Raises RuntimeError if the device has failed."""
        ...


class DeviceQueue(Protocol):
    """Does what it is given in order. Nothing here keeps the host waiting."""

    def submit(self, work: Callable[[], None]) -> None:
        """Queues the device's part of some work; what is not on the device happens at once."""
        ...

    def mark(self) -> Mark:
        """A mark behind all that it has been given so far."""
        ...

    def after(self, mark: Mark) -> None:
        """What it is given from now on begins when a mark, of whatever queue, is passed."""
        ...


@dataclass(frozen=True, slots=True)
class Queues:
    """The queues of a device."""

    compute: DeviceQueue
    """Where steps run."""
    inward: DeviceQueue
    """Host to device."""
    outward: DeviceQueue
    """Device to host: the other direction has a copy engine of its own, so neither waits for the other."""


def queues_of(device: torch.device) -> Queues:
    """Streams of a CUDA device; on "cpu" there is nothing that could run beside anything."""
    if device.type != "cuda":
        return Queues(_HostQueue(), _HostQueue(), _HostQueue())
    # Steps wait for what comes in, so its kernels go before those of a step that is running; nobody waits for the rest.
    inward = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call] # torch's own gap
    outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's own gap
    return Queues(
        _CudaQueue(lambda: torch.cuda.current_stream(device)), _CudaQueue(lambda: inward), _CudaQueue(lambda: outward)
    )


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a thread that waits sleeps.
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch's own gap
        self.event.record(stream)

    def passed(self) -> bool:
        passed: bool = self.event.query()  # type: ignore[no-untyped-call] # torch's own gap
        return passed

    def wait(self) -> None:
        self.event.synchronize()


class _CudaQueue:
    def __init__(self, stream: Callable[[], torch.cuda.Stream]) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream()):
            work()

    def mark(self) -> _CudaMark:
        return _CudaMark(self._stream())

    def after(self, mark: Mark) -> None:
        if not isinstance(mark, _CudaMark):
            raise TypeError(f"mark is a {type(mark).__name__}, expected one of a CUDA queue")
        self._stream().wait_event(mark.event)


class _Passed:
    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _HostQueue:
    """Has done what it is given when ``submit`` returns."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> Mark:
        return _Passed()

    def after(self, mark: Mark) -> None:
        mark.wait()
