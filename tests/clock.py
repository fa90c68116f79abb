"""A clock for tests, which stands still until it is set."""


class Clock:
    """Gives `now`, in seconds."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
