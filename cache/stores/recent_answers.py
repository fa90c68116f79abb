"""Which answers were served a moment ago: a client that asks the same again so soon wants another one."""

import time
from collections import OrderedDict
from collections.abc import Callable

from cache.errors import StoreUnavailable
from cache.stores.redis_store import RedisStore

_KEPT = 65_536
_PREFIX = "keepgate:served:"


class RecentAnswers:
    """The entries served within `seconds`: in Redis for all workers, in this process where there is none."""

    def __init__(self, redis: RedisStore | None, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._seconds = seconds
        self._clock = clock
        self._served: OrderedDict[str, float] = OrderedDict()

    async def serve(self, entry_id: str) -> bool:
        """Note that an entry is served; whether it had been within the time before. A failing Redis knows nothing."""
        if self._redis is not None:
            command = ("SET", _PREFIX + entry_id, 1, "PX", max(1, round(self._seconds * 1000)), "GET")
            try:
                return await self._redis.command(command) is not None
            except StoreUnavailable:
                return False
        now = self._clock()
        before = self._served.pop(entry_id, -self._seconds)
        self._served[entry_id] = now
        if len(self._served) > _KEPT:
            self._served.popitem(last=False)
        return now - before < self._seconds
