"""How often a judge is asked whom each question costs something."""

_FIRST = 500.0


class Ration:
    """Allows `share` comparisons for each fresh answer, and 500 more to begin with.

    Args:
        share: infinite for a judge who costs nothing.
    """

    def __init__(self, share: float) -> None:
        self.is_short = share < 1.0
        self._share = share
        self._left = _FIRST

    def earn(self) -> None:
        """There is a fresh answer."""
        self._left = min(_FIRST, self._left + self._share)

    def take(self) -> bool:
        """Whether there may be one more comparison."""
        has_some = self._left >= 1.0
        self._left -= has_some
        return has_some
