"""A request's use of a chain of blocks, for eviction."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol


class _Watcher(Protocol):
    def on_access_end(self, access: "Access", last: Any) -> None: ...


@dataclass(slots=True, eq=False)
class Access:
    """A request. All its uses have the same object, so that they count as one use of a block.

    A live engine sets the output length with `end` when the answer is complete. A trace has it at arrival; the effect
    on a replay is in docs/decisions/016-eviction.md.
    """

    time: float
    """Arrival of the request: seconds of a monotonic clock. Several may be equal."""
    one_shot: bool = False
    """No conversation follows: its new blocks are stored only at their second use."""
    output_length: int | None = None
    """Tokens of the answer; None while it is not complete."""
    _watchers: dict[_Watcher, Hashable] = field(default_factory=dict)

    def end(self, output_length: int) -> None:
        """Sets the output length once; later calls do nothing. Raises ValueError for a negative number."""
        if output_length < 0:
            raise ValueError(f"output_length is {output_length}, expected at least 0")
        if self.output_length is not None:
            return
        self.output_length = output_length
        watchers, self._watchers = self._watchers, {}
        for watcher, last in watchers.items():
            watcher.on_access_end(self, last)

    def watch(self, watcher: _Watcher, last: Hashable) -> None:
        """Calls ``watcher.on_access_end(self, last)`` when the answer is complete, with the latest `last`."""
        if self.output_length is None:
            self._watchers[watcher] = last
