"""How many requests may be sent twice (Google, "Site Reliability Engineering", 2016, chapter 21: retry budgets)."""

from collections import deque

_WINDOW = 10
_LEAST = 10


class RetryBudget:
    """Counts requests and retries by the second, over the last ten seconds. Times are those of one clock."""

    def __init__(self, least: int = _LEAST) -> None:
        """`least` retries in ten seconds are allowed whatever the share."""
        self._least = least
        self._seconds: deque[list[int]] = deque()  # second, requests, retries
        self._requests = 0
        self._retries = 0

    def count(self, now: float) -> None:
        """Count a request."""
        self._second(now)[1] += 1
        self._requests += 1

    def take(self, now: float, share: float) -> bool:
        """Whether one more retry is allowed, if they may be this share of the requests; if so it is counted, until it
        is given back.
        """
        second = self._second(now)
        if self._retries >= max(self._least, share * self._requests):
            return False
        second[2] += 1
        self._retries += 1
        return True

    def give_back(self, taken: float) -> None:
        """A retry that was taken at this time has been answered: it was no load in vain."""
        for second in self._seconds:
            if second[0] == int(taken):
                second[2] -= 1
                self._retries -= 1

    def _second(self, now: float) -> list[int]:
        number = int(now)
        if self._seconds and self._seconds[-1][0] == number:
            return self._seconds[-1]
        while self._seconds and self._seconds[0][0] <= number - _WINDOW:
            _, requests, retries = self._seconds.popleft()
            self._requests -= requests
            self._retries -= retries
        self._seconds.append([number, 0, 0])
        return self._seconds[-1]
