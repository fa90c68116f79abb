"""Sends a prompt to the upstream that holds most of it, as long as that is not busier than the others."""

import math
from collections.abc import Mapping, Sequence

from gateway.routing.prefixes.history import PrefixHistory
from gateway.routing.strategies.load import load
from gateway.routing.strategies.rotation import Weighted
from gateway.routing.strategy import C, Candidate, RouteRequest

_MIN_SHARE = 0.1
"""A smaller share of a prompt, such as a system prompt that all have, decides nothing."""
_FADE: float = 0.5 ** (1 / 256)
"""The weight of work halves every 256 requests."""
_DEVIATIONS = 2.0
_SPARE_REQUESTS = 2.0
_STEPS = 64
"""Shares are compared in steps, so that those of an upstream's tokens and of blocks of text are equal if they mean so.
"""


class PrefixAware:
    """Orders by the leading share of the prompt that an upstream holds; what upstreams say themselves
    (`RouteRequest.held`) counts before `history`.

    Two bounds keep a prefix that many prompts share from making a hot spot; an upstream above one of them comes after
    all that are not. Both are `bound` times the mean over the candidates, for an upstream's weight (Mirrokni, Thorup
    and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018), and a little more, for small counts differ by
    chance:
    - requests under way, and two standard deviations;
    - recent work, and two requests: work is blocks of prompts that were not there, and one for each request.
    """

    def __init__(self, history: PrefixHistory, bound: float) -> None:
        self._history = history
        self._bound = bound
        self._work: dict[str, float] = {}
        self._requests = 0.0
        """How many requests `_work` is of."""
        self._rotation = Weighted()

    def order(self, candidates: Sequence[C], request: RouteRequest) -> list[C]:
        if not candidates:
            return []
        weight = sum(candidate.weight for candidate in candidates)
        mean_requests = (sum(candidate.in_flight for candidate in candidates) + 1) / weight
        mean_work = sum(self._work.get(candidate.name, 0.0) for candidate in candidates) / weight
        size = sum(self._work.values()) / self._requests if self._requests else 1.0
        shares = self._shares(candidates, request)

        def rank(candidate: C) -> tuple[bool, bool, int, float, float]:
            work = self._work.get(candidate.name, 0.0)
            fair = mean_requests * candidate.weight
            is_busy = candidate.in_flight + 1 > self._bound * fair + _DEVIATIONS * math.sqrt(fair)
            is_loaded = work > self._bound * mean_work * candidate.weight + _SPARE_REQUESTS * size
            share = shares.get(candidate.name, 0.0)
            held = round(share * _STEPS) if share > _MIN_SHARE else 0
            return is_busy, is_loaded, -held, work / candidate.weight, load(candidate)

        return sorted(self._rotation.order(candidates, request), key=rank)

    def sent(self, candidate: Candidate, request: RouteRequest) -> None:
        held = self._shares([candidate], request).get(candidate.name, 0.0)
        self._history.sent(candidate.name, request.blocks)
        for name in self._work:
            self._work[name] *= _FADE
        self._requests = self._requests * _FADE + 1
        work = 1.0 + len(request.blocks) * (1.0 - held)
        self._work[candidate.name] = self._work.get(candidate.name, 0.0) + work

    def _shares(self, candidates: Sequence[Candidate], request: RouteRequest) -> Mapping[str, float]:
        unknown = [candidate.name for candidate in candidates if candidate.name not in request.held]
        return {**self._history.shares(unknown, request.blocks), **request.held}
