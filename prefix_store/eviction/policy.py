"""What a policy is told, and what it is asked."""

from collections.abc import Sequence
from typing import Any, Protocol

from prefix_store.eviction.access import Access
from prefix_store.eviction.run import Run


class Policy(Protocol):
    """Chooses which chain loses its tail. It belongs to one tree and is used by that tree alone."""

    def used(self, path: Sequence[Run[Any]], access: Access) -> None:
        """These runs are used. Comes before they say so themselves: their `access` and `uses` are those before."""

    def met(self, run: Run[Any], blocks: int) -> None:
        """The last so many blocks of this run are new; their first use is `run.access`."""

    def ended(self, run: Run[Any]) -> None:
        """`run.access`, its last use, has learned its output length."""

    def forgot(self, run: Run[Any], blocks: int) -> None:
        """So many blocks of this run are not known any more."""

    def add(self, run: Run[Any]) -> None:
        """This run may lose blocks; sets `run.place` to something that is not negative."""

    def discard(self, run: Run[Any]) -> None:
        """It may not any more, or will be added again after a use; sets `run.place` to -1."""

    def victim(self) -> Run[Any] | None:
        """The run that should lose its last stored block now, one of those that were added; None if there is none."""
