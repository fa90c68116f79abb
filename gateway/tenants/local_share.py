"""Limits with Redis away: each worker keeps to its share of them."""

import time
from collections import deque
from collections.abc import Sequence

from gateway.tenants.scope import DAY, MONTH, REQUESTS, SLOTS, TOKENS, Refusal, Scope

_MINUTE = 60.0


class _Window:
    """What was used in the last minute."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, int]] = deque()
        self.sum = 0

    def drop_old(self, now: float) -> None:
        while self._taken and self._taken[0][0] <= now - _MINUTE:
            self.sum -= self._taken.popleft()[1]

    def add(self, now: float, amount: int) -> None:
        self._taken.append((now, amount))
        self.sum += amount

    def wait(self, now: float) -> float:
        """Seconds until less is used."""
        return self._taken[0][0] + _MINUTE - now if self._taken else _MINUTE


class LocalShare:
    """What this worker lets through of one scope during an outage.

    What it let through in another outage of the last minute counts.
    """

    def __init__(self, former: "LocalShare | None" = None) -> None:
        """`former` is the share of the outage before, whose money Redis has heard of since."""
        self._requests: _Window = _Window() if former is None else former._requests
        self._tokens: _Window = _Window() if former is None else former._tokens
        self._running = 0
        self._money = 0

    def refusal(
        self, scope: Scope, workers: int, tokens: int | None, money: int, spent: tuple[int, int]
    ) -> Refusal | None:
        """The limit that a request reaches.

        `tokens` is None for a hit; `spent` is what Redis last said of day and month.
        """
        now = time.monotonic()
        self._requests.drop_old(now)
        self._tokens.drop_old(now)
        most = {which: max(1, scope.limit(which) // workers) for which in (REQUESTS, TOKENS, SLOTS)}
        if scope.limit(REQUESTS) >= 0 and self._requests.sum >= most[REQUESTS]:
            return Refusal(scope, REQUESTS, self._requests.wait(now), scope.limit(REQUESTS))
        if tokens is None:
            return None
        if scope.limit(TOKENS) >= 0 and self._tokens.sum + min(tokens, most[TOKENS]) > most[TOKENS]:
            return Refusal(scope, TOKENS, self._tokens.wait(now), scope.limit(TOKENS))
        if scope.limit(SLOTS) >= 0 and self._running >= most[SLOTS]:
            return Refusal(scope, SLOTS, 1.0, scope.limit(SLOTS))
        for which, before in ((DAY, spent[0]), (MONTH, spent[1])):
            left = (scope.limit(which) - before) // workers - self._money
            if scope.limit(which) >= 0 and (left <= 0 or money > left):
                return Refusal(scope, which, _MINUTE, before + self._money)
        return None

    def take(self, scope: Scope, workers: int, tokens: int | None, money: int) -> None:
        """Count a request that no share refused."""
        now = time.monotonic()
        self._requests.add(now, 1)
        if tokens is not None:
            most = max(1, scope.limit(TOKENS) // workers)
            self._tokens.add(now, min(tokens, most))
            self._running += 1
            self._money += money

    def settle(self, money: int) -> None:
        self._money += money

    def release(self) -> None:
        self._running -= 1


def first_refusal(
    shares: Sequence[tuple[Scope, LocalShare, tuple[int, int]]], workers: int, tokens: int | None, money: int
) -> Refusal | None:
    """The refusal of the first share that has one; else the request is counted in all."""
    for scope, share, spent in shares:
        if found := share.refusal(scope, workers, tokens, money, spent):
            return found
    for scope, share, _ in shares:
        share.take(scope, workers, tokens, money)
    return None
