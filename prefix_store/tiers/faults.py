"""What the system says when it fails, counted each time and logged once."""

from __future__ import annotations

import errno
import logging
from collections import Counter

log = logging.getLogger(__name__)


class Faults:
    """The failures of one kind of call. One thread uses it."""

    def __init__(self, doing: str, counter: Counter[str]) -> None:
        """`doing` completes the sentence "failed while ..."."""
        self._doing = doing
        self._counter = counter
        self._last = ""

    def failed(self, error: OSError) -> None:
        """Counts it under its name, such as ENOSPC; logs it unless it is what was said last."""
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        self._counter[name] += 1
        if name != self._last:
            self._last = name
            log.warning("failed while %s: %s", self._doing, error)

    def worked(self) -> None:
        """Says so where it had failed before."""
        if self._last:
            self._last = ""
            log.info("works again: %s", self._doing)
