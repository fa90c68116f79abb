"""Finds stop strings in text that arrives in pieces, and holds back what may be the start of one."""

from __future__ import annotations


class StopStrings:
    """Watches one answer. Text is released as soon as no stop string can begin in it."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; returns what may be sent now, and whether a stop string was found.

        The stop string itself and everything after it are never released. Of several that match, the one that
        begins first counts.
        """
        if not self._stops or not text:
            return text, False
        self._held += text
        found = min((at for stop in self._stops if (at := self._held.find(stop)) >= 0), default=-1)
        if found >= 0:
            released, self._held = self._held[:found], ""
            return released, True
        keep = self._possible_start()
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released, False

    def finish(self) -> str:
        """What was held back, when the answer ends for another reason."""
        released, self._held = self._held, ""
        return released

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(max(map(len, self._stops)) - 1, len(self._held))
        for length in range(longest, 0, -1):
            if self._held.endswith(tuple(stop[:length] for stop in self._stops if len(stop) > length)):
                return length
        return 0
