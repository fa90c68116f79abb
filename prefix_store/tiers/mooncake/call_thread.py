"""A thread that calls Mooncake."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from prefix_store.tiers.cancellation import CancelToken
from prefix_store.tiers.counts import FailureLog, TierCounts
from prefix_store.tiers.worker import Worker

T = TypeVar("T")


class CallThread:
    """Does one kind of work in its own thread; counts the store's failures, and logs them once.

    Args:
        name: of the thread.
        doing: completes the sentence "failed while ...".
        may_call: whether the store is there; asked when work is to begin, which may have waited for other work.
        failed: called in the thread with each OSError.
    """

    def __init__(
        self,
        name: str,
        doing: str,
        counts: TierCounts,
        may_call: Callable[[], bool],
        failed: Callable[[OSError], None],
    ) -> None:
        self._worker = Worker(f"kv-mooncake-{name}")
        self._faults = FailureLog(doing, counts.io_errors)
        self._may_call, self._failed = may_call, failed
        self._is_busy = False

    @property
    def is_busy(self) -> bool:
        """Whether a call is running, also an abandoned one."""
        return self._is_busy

    async def run(
        self,
        work: Callable[[CancelToken], T],
        otherwise: T,
        cancel: CancelToken | None = None,
        in_any_case: bool = False,
    ) -> T:
        """The work's result, or `otherwise` if it raises OSError or the store is not there; else as `Worker.run`.

        Args:
            in_any_case: whether the work is begun also where the store is not there.
        """

        def tried(own: CancelToken) -> T:
            if not (in_any_case or self._may_call()):
                return otherwise
            self._is_busy = True
            try:
                result = work(own)
            except OSError as error:
                self._faults.failed(error)
                self._failed(error)
                return otherwise
            except RuntimeError as error:  # raised for an exception of its C++
                self._faults.failed(OSError(errno.EIO, str(error)))
                return otherwise
            finally:
                self._is_busy = False
            self._faults.recovered()
            return result

        return await self._worker.run(tried, cancel)

    async def close(self) -> None:
        """As `Worker.close`."""
        await self._worker.close()
