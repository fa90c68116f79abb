"""Queues that get on at random, as a device's may: everything that they do not wait for can happen in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from backend.runners.cuda.streams import DeviceQueue, Mark, Queues, queues_of


class SimulatedDevice:
    """Three queues that do nothing by themselves.

    Args:
        seed: decides which of them gets on when, and how fast each of them is.
    """

    def __init__(self, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._queues = [SimulatedQueue(self) for _ in range(3)]
        self._speeds = [int(self._chance.choice([1, 10, 100])) for _ in self._queues]
        self.queues = Queues(*self._queues)

    def beside(self, compute: DeviceQueue) -> Queues:
        """The same with another queue where the steps are."""
        return Queues(compute, self.queues.inward, self.queues.outward)

    def get_on(self, most: int) -> None:
        """Does up to so many things."""
        for _ in range(int(self._chance.integers(most + 1))):
            if not self._move():
                return

    def until(self, mark: Mark) -> None:
        """Does what must be done before a mark is passed, and some other things."""
        while not mark.passed():
            if not self._move():
                raise AssertionError("the queues wait for each other")

    def _move(self) -> bool:
        ready = [(queue, speed) for queue, speed in zip(self._queues, self._speeds, strict=True) if queue.can_move]
        if not ready:
            return False
        speeds = np.array([speed for _, speed in ready])
        ready[self._chance.choice(len(ready), p=speeds / speeds.sum())][0].move()
        return True


class SimulatedQueue:
    """See ``DeviceQueue``; what it has to do is in ``todo``, the marks in it too."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._todo: deque[tuple[Mark | None, Callable[[], None]]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        self._todo.append((None, work))

    def mark(self) -> Mark:
        mark = SimulatedMark(self._device)
        self._todo.append((None, mark.pass_by))
        return mark

    def after(self, mark: Mark) -> None:
        self._todo.append((mark, lambda: None))

    @property
    def can_move(self) -> bool:
        """Whether there is something to do that need not wait."""
        return bool(self._todo) and (self._todo[0][0] is None or self._todo[0][0].passed())

    def move(self) -> None:
        """Does the next thing."""
        self._todo.popleft()[1]()


class SimulatedMark:
    """See ``Mark``."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._passed = False

    def passed(self) -> bool:
        return self._passed

    def wait(self) -> None:
        self._device.until(self)

    def pass_by(self) -> None:
        """All before it is done."""
        self._passed = True


def host_queue() -> DeviceQueue:
    """Where what is submitted has happened when the call returns, and what waits for a mark waits there and then."""
    return queues_of(torch.device("cpu")).compute
