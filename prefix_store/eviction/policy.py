"""The interface of an eviction policy."""

from collections.abc import Sequence
from typing import Any, Protocol

from prefix_store.eviction.access import Access
from prefix_store.eviction.run import Run


class Policy(Protocol):
    """Chooses the chain whose tail is evicted. One tree uses it."""

    def on_use(self, path: Sequence[Run[Any]], access: Access) -> None:
        """These runs are used. Called before they are updated: `access` and `uses` are the old ones."""

    def on_insert(self, run: Run[Any], blocks: int) -> None:
        """The last `blocks` of this run are new; their first use is `run.access`."""

    def on_access_end(self, run: Run[Any]) -> None:
        """`run.access`, its last use, has an output length now."""

    def on_forget(self, run: Run[Any], blocks: int) -> None:
        """`blocks` blocks of this run are no longer known."""

    def add(self, run: Run[Any]) -> None:
        """This run may lose blocks; sets `run.place` to a number of at least 0."""

    def discard(self, run: Run[Any]) -> None:
        """It may no longer, or will be added again after a use; sets `run.place` to -1."""

    def victim(self) -> Run[Any] | None:
        """Of the added runs, the one whose last stored block is evicted next; None if there is none."""
