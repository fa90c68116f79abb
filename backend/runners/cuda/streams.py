"""Streams of a device, as an interface that tests can simulate: each keeps its order, and they run concurrently.

The names are those of CUDA: an event is recorded in a stream, and is complete when all work before it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether all work before it is done; does not wait."""
        ...

    def synchronize(self) -> None:
        """Blocks the calling thread until the event is complete. Raises RuntimeError if the device has failed."""
        ...


class Stream(Protocol):
    """Work of a device, done in order. No method waits for the device."""

    def submit(self, work: Callable[[], None]) -> None:
        """Calls ``work`` with this as the current stream: what it launches is queued, host code runs at once."""
        ...

    def record_event(self) -> Event:
        """An event after all work submitted so far."""
        ...

    def wait_event(self, event: Event) -> None:
        """Work submitted from now on starts when the event, of any stream, is complete."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceStreams:
    """The streams of a device."""

    compute: Stream
    """Steps run here."""
    host_to_device: Stream
    device_to_host: Stream
    """Separate, because each direction has a copy engine of its own."""


def device_streams(device: torch.device) -> DeviceStreams:
    """Streams of a CUDA device; on "cpu" each does its work at once."""
    if device.type != "cuda":
        return DeviceStreams(_HostStream(), _HostStream(), _HostStream())
    # Steps wait for restored blocks, so their kernels precede those of a running step. Nothing waits for copies out.
    inbound = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call] # torch's own gap
    outbound = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's own gap
    return DeviceStreams(
        _CudaStream(lambda: torch.cuda.current_stream(device)),
        _CudaStream(lambda: inbound),
        _CudaStream(lambda: outbound),
    )


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a thread that waits sleeps.
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch's own gap
        self.event.record(stream)

    def query(self) -> bool:
        complete: bool = self.event.query()  # type: ignore[no-untyped-call] # torch's own gap
        return complete

    def synchronize(self) -> None:
        self.event.synchronize()


class _CudaStream:
    def __init__(self, stream: Callable[[], torch.cuda.Stream]) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream()):
            work()

    def record_event(self) -> _CudaEvent:
        return _CudaEvent(self._stream())

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, _CudaEvent):
            raise TypeError(f"event is a {type(event).__name__}, expected one of a CUDA stream")
        self._stream().wait_event(event.event)


class _CompleteEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _HostStream:
    """All work is done when ``submit`` returns."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def record_event(self) -> Event:
        return _CompleteEvent()

    def wait_event(self, event: Event) -> None:
        event.synchronize()
