"""How fast an engine prefills, measured as it works."""

from __future__ import annotations

_MIN_ROWS = 32
_WEIGHT = 0.2


class PrefillRate:
    """What a block costs to compute. Steps in which answers go on token by token say nothing about that.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._row_seconds: float | None = None

    def note(self, rows: int, prompt_rows: int, seconds: float) -> None:
        """A step computed so many tokens, so many of them of prompts, in so many seconds."""
        if prompt_rows < _MIN_ROWS or 2 * prompt_rows < rows:
            return
        each = seconds / rows
        known = self._row_seconds
        self._row_seconds = each if known is None else known + _WEIGHT * (each - known)

    @property
    def block_seconds(self) -> float | None:
        """Seconds for the tokens of a block; None: nothing has been prefilled yet."""
        return None if self._row_seconds is None else self._row_seconds * self._block_size
