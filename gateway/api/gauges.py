"""The gauges of this worker."""

from cache.exact import ExactCache
from gateway import metrics
from gateway.proxy.flight import FlightTable


class Gauges:
    """Copies the present state of the cache and the flights into the metrics."""

    def __init__(self, cache: ExactCache, flights: FlightTable, hits: metrics.HitCounter) -> None:
        self._cache = cache
        self._flights = flights
        self._hits = hits

    def refresh(self) -> None:
        self._hits.flush()
        memory, redis = self._cache.memory, self._cache.redis
        metrics.memory_entries.set(len(memory))
        metrics.memory_bytes.set(memory.size)
        metrics.memory_evictions.set(memory.evictions)
        metrics.redis_available.set(redis is not None and not redis.breaker.is_open)
        metrics.flights.set(len(self._flights))
