"""Finds stop strings in text that arrives in pieces, and holds back what may be the start of one.

Each stop string is followed by the algorithm of Knuth, Morris and Pratt (1977), so a character costs the same however
long the stop strings are and whatever text they are made to nearly match: this runs between the steps of the engine,
where everybody waits for it.
"""

from __future__ import annotations

from functools import lru_cache


class StopStrings:
    """Watches one answer. Text is released as soon as no stop string can begin in it."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = [(stop, _fallbacks(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        """For each stop string how many of its first characters the text ends with."""
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; returns what may be sent now, and whether a stop string was found.

        The stop string itself and everything after it are never released. Of several that match, the one that
        begins first counts.
        """
        if not self._stops or not text:
            return text, False
        begins = [begin for index in range(len(self._stops)) if (begin := self._follow(index, text)) is not None]
        self._held += text
        keep = len(self._held) - min(begins) if begins else max(self._matched)
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if begins:
            self._held = ""
        return released, bool(begins)

    def finish(self) -> str:
        """What was held back, when the answer ends for another reason."""
        released, self._held = self._held, ""
        return released

    def _follow(self, index: int, text: str) -> int | None:
        """Where in the held text and the new one a stop string begins, once it is complete."""
        stop, fallbacks = self._stops[index]
        matched = self._matched[index]
        for position, character in enumerate(text):
            while matched >= 0 and stop[matched] != character:
                matched = fallbacks[matched]
            matched += 1
            if matched == len(stop):
                return len(self._held) + position + 1 - len(stop)
        self._matched[index] = matched
        return None


@lru_cache(maxsize=256)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """For each number of matched characters: how many still match when the next one does not; -1: not even it.

    Cached, for the answers to one request share their stop strings.
    """
    fallbacks = [-1]
    border = 0  # length of the longest proper start of what has been read that is also its end
    for character in stop[1:]:
        # Falling back to where the same character is expected would fail again.
        fallbacks.append(fallbacks[border] if stop[border] == character else border)
        while border >= 0 and stop[border] != character:
            border = fallbacks[border]
        border += 1
    return tuple(fallbacks)
