"""Sends a request to an upstream that has its model loaded, unless waiting there takes longer than loading it."""

import time
from collections.abc import Callable, Sequence

from gateway.routing.strategies.load import load
from gateway.routing.strategies.rotation import Weighted
from gateway.routing.strategy import C, Candidate, RouteRequest

_KEPT_SECONDS = 300.0
"""How long servers that load models on demand keep an unused one; Ollama's default."""
_MAX_MODELS = 64
"""Models that are remembered of an upstream."""
_UNKNOWN_LATENCY = 1.0


class LoadedModels:
    """Which models upstreams have in memory: as they say, and from what they were sent since. The strategies of all
    models share it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[str, dict[str, float]] = {}

    def note(self, upstream: str, model: str) -> None:
        """The upstream answers for the model, so it will have loaded it."""
        used = self._used.setdefault(upstream, {})
        used.pop(model, None)
        used[model] = self._clock()
        if len(used) > _MAX_MODELS:
            del used[next(iter(used))]

    def has(self, upstream: Candidate, model: str) -> bool:
        """Whether the upstream says that it has the model, or was sent a request for it recently."""
        used = self._used.get(upstream.name, {}).get(model)
        if (told := upstream.loaded) is not None:
            return model in told.models or (used is not None and used > told.at)
        return used is not None and self._clock() - used < _KEPT_SECONDS


class ModelAware:
    """Orders by the seconds until an answer begins: what is under way, and `cold_start` where the model is not loaded.

    `cold_start` is for an upstream of weight 1; a faster one loads faster.
    """

    def __init__(self, loaded: LoadedModels, cold_start: float) -> None:
        self._loaded = loaded
        self._cold_start = cold_start
        self._rotation = Weighted()

    def order(self, candidates: Sequence[C], request: RouteRequest) -> list[C]:
        known = [candidate.latency for candidate in candidates if candidate.latency]
        # The latency of others stands in for one that is not known yet.
        usual = sum(known) / len(known) if known else _UNKNOWN_LATENCY

        def seconds(candidate: C) -> tuple[float, bool]:
            is_cold = not self._loaded.has(candidate, request.model)
            loading = self._cold_start / candidate.weight if is_cold else 0.0
            return (candidate.latency or usual) * load(candidate) + loading, is_cold

        return sorted(self._rotation.order(candidates, request), key=seconds)

    def sent(self, candidate: Candidate, request: RouteRequest) -> None:
        self._loaded.note(candidate.name, request.model)
