"""One request's use of a chain of blocks, as eviction sees it."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol


class _Watcher(Protocol):
    def ended(self, access: "Access", last: Any) -> None: ...


@dataclass(slots=True, eq=False)
class Access:
    """A request. The same object goes with each use that it makes: however often it uses a block, it counts once.

    A live engine knows how long an answer is only when it is complete, and says it with `end`. A trace knows it at
    arrival; what a replay gains by that is in docs/decisions/016-eviction.md.
    """

    time: float
    """When the request came: seconds of any clock that does not go back. Many may have the same."""
    one_shot: bool = False
    """No conversation will follow: its new blocks are kept only when they are used a second time."""
    output_length: int | None = None
    """Tokens of the answer; None while it is not complete."""
    _watchers: dict[_Watcher, Hashable] = field(default_factory=dict)

    def end(self, output_length: int) -> None:
        """Say how many tokens the answer had; what was said first counts. Raises ValueError for a negative number."""
        if output_length < 0:
            raise ValueError(f"output_length is {output_length}, expected at least 0")
        if self.output_length is not None:
            return
        self.output_length = output_length
        watchers, self._watchers = self._watchers, {}
        for watcher, last in watchers.items():
            watcher.ended(self, last)

    def watch(self, watcher: _Watcher, last: Hashable) -> None:
        """Have ``watcher.ended(self, last)`` called when the answer is complete; `last` is what it said last."""
        if self.output_length is None:
            self._watchers[watcher] = last
