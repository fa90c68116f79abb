"""Streams that progress at random: work that does not wait for an event may run in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from backend.runners.cuda.kv_blocks import CudaKvBlocks
from backend.runners.cuda.runner import CudaRunner
from backend.runners.cuda.streams import DeviceStreams, Event, Stream, device_streams


class SimulatedDevice:
    """Three streams that progress only when a test says so.

    Args:
        seed: decides which of them progresses when, and how fast each of them is.
    """

    def __init__(self, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._streams = [SimulatedStream(self) for _ in range(3)]
        self._speeds = [int(self._chance.choice([1, 10, 100])) for _ in self._streams]
        self.streams = DeviceStreams(*self._streams)

    def beside(self, compute: Stream) -> DeviceStreams:
        """The same with another compute stream."""
        return DeviceStreams(compute, self.streams.host_to_device, self.streams.device_to_host)

    def get_on(self, most: int) -> None:
        """Runs up to so many pieces of work."""
        for _ in range(int(self._chance.integers(most + 1))):
            if not self._move():
                return

    def until(self, event: Event) -> None:
        """Runs what must be done before an event is complete, and some other work."""
        while not event.query():
            if not self._move():
                raise AssertionError("the streams wait for each other")

    def _move(self) -> bool:
        ready = [(stream, speed) for stream, speed in zip(self._streams, self._speeds, strict=True) if stream.can_move]
        if not ready:
            return False
        speeds = np.array([speed for _, speed in ready])
        ready[self._chance.choice(len(ready), p=speeds / speeds.sum())][0].move()
        return True


class SimulatedStream:
    """See ``Stream``; ``_todo`` has its work and its events."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._todo: deque[tuple[Event | None, Callable[[], None]]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        self._todo.append((None, work))

    def record_event(self) -> Event:
        event = SimulatedEvent(self._device)
        self._todo.append((None, event.complete))
        return event

    def wait_event(self, event: Event) -> None:
        self._todo.append((event, lambda: None))

    @property
    def can_move(self) -> bool:
        """Whether the next piece of work need not wait."""
        return bool(self._todo) and (self._todo[0][0] is None or self._todo[0][0].query())

    def move(self) -> None:
        """Runs the next piece of work."""
        self._todo.popleft()[1]()


class SimulatedEvent:
    """See ``Event``."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._is_complete = False

    def query(self) -> bool:
        return self._is_complete

    def synchronize(self) -> None:
        self._device.until(self)

    def complete(self) -> None:
        """Marks that all work before the event is done."""
        self._is_complete = True


def use_streams(runner: CudaRunner, streams: DeviceStreams, staging_memory: int = 2**20) -> CudaKvBlocks:
    """KV blocks of the runner that are copied on these streams.

    Private, as a runner makes the streams of its own device.
    """
    runner._kv_blocks = CudaKvBlocks(runner.decoder.memory, staging_memory, streams)
    return runner._kv_blocks


def host_stream() -> Stream:
    """A stream whose work is done when ``submit`` returns."""
    return device_streams(torch.device("cpu")).compute
