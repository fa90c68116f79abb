"""A request that was admitted: what it has reserved, and what becomes of that."""

from collections.abc import Callable

from gateway.tenants.local_share import LocalShare
from gateway.tenants.scope import NANO, REQUESTS, TOKENS, rate_headers, tightest
from gateway.tenants.usage import AdmittedMiss, Usage

_WINDOW = 61.0


class Admission:
    """Of a caller without limits: nothing is reserved or settled. A context manager, which releases."""

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's headers of the limits by the minute that this request counts for."""
        return {}

    def settle(self, tokens: int, dollars: float) -> None:
        """Replace the reservation by what the request used: (0, 0) for one that failed. Only the first call counts."""

    def release(self) -> None:
        """The request runs no longer. Only the first call counts."""

    def __enter__(self) -> "Admission":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


UNLIMITED = Admission()


class Reservation(Admission):
    """Of a caller with limits. `report` says that the usage has news for Redis."""

    def __init__(self, usage: Usage, report: Callable[[Usage], None], admitted: AdmittedMiss) -> None:
        self._usage = usage
        self._report = report
        self._lease, self._slot, self._money = admitted
        self._unused = self._lease.left
        self._is_settled = False

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for name, which, each in (("requests", REQUESTS, 1), ("tokens", TOKENS, self._lease.tokens)):
            if found := tightest(self._usage.scopes, which, self._lease.used[which - 1 :: 4]):
                limit, left = found
                headers |= rate_headers(name, limit, left + self._unused * each, _WINDOW)
        return headers

    def settle(self, tokens: int, dollars: float) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        batch = self._usage.batch
        batch.tokens.append((self._lease.second, self._lease.tokens, tokens))
        used = round(dollars * NANO)
        if self._money is None:
            batch.unreserved += used
        else:
            batch.money.append((self._money.text, used))
            self._usage.reserved.discard(self._money)
        self._report(self._usage)

    def release(self) -> None:
        if self._usage.slots.pop(self._slot, None) is not None:
            self._usage.free([self._slot])
            self._report(self._usage)


class LocalAdmission(Admission):
    """Of a request within this worker's share, while Redis is away."""

    def __init__(
        self, usage: Usage, report: Callable[[Usage], None], shares: tuple[LocalShare, ...], money: int
    ) -> None:
        self._usage = usage
        self._report = report
        self._shares = shares
        self._money = money
        self._is_settled = False
        self._is_released = False

    def settle(self, tokens: int, dollars: float) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        used = round(dollars * NANO)
        for share in self._shares:
            share.settle(used - self._money)
        # Budgets hear of it once Redis is back; its minute will have passed.
        self._usage.batch.unreserved += used
        self._report(self._usage)

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            for share in self._shares:
                share.release()
