"""Whether the cache has an answer to a call, and whether it may be served."""

import random

from cache.entries.key import Key
from cache.entries.outcomes import Bypass, Failed, Hit, Miss, Outcome
from cache.exact import ExactCache
from gateway import metrics
from gateway.proxy.call import Call
from gateway.settings.settings import CacheSettings


class Lookup:
    """The cache, asked under the operator's rules and the client's."""

    def __init__(self, cache: ExactCache, settings: CacheSettings) -> None:
        self._cache = cache
        self._settings = settings

    async def find(self, call: Call) -> tuple[Key, Outcome]:
        """What the cache has, and the key under which a new answer to this call belongs."""
        if reason := self._bypass_reason(call):
            return call.key, Bypass(reason)
        if call.sampled and self._settings.sampled == "variants":
            return await self._draw_variant(call)
        return call.key, await self._look_up(call.key)

    def landed(self, call: Call, key: Key, outcome: Outcome) -> Hit | None:
        """The answer to this very call, where this process has got it since the outcome, and it may be served."""
        hit = None if isinstance(outcome, Bypass) else self._cache.at_hand(key)
        return hit if hit is not None and self.may_serve(call, hit) else None

    def may_serve(self, call: Call, hit: Hit) -> bool:
        """Whether the entry answers the call: fresh enough for the client, or for now (RFC 5861, section 3)."""
        if call.needs_usage and not hit.entry.has_usage:
            return False
        return call.directives.accepts(hit) or _is_within(self._settings.stale_while_revalidate, call, hit)

    def stand_in(self, call: Call, outcome: Outcome) -> Hit | None:
        """The entry that will do while the upstream fails, if there is one (RFC 5861, section 4)."""
        if not isinstance(outcome, Hit) or (call.needs_usage and not outcome.entry.has_usage):
            return None
        return outcome if _is_within(self._settings.stale_if_error, call, outcome) else None

    def _bypass_reason(self, call: Call) -> str | None:
        if not self._settings.enabled:
            return "disabled"
        if call.directives.no_store:
            return "no-store"
        if call.sampled and self._settings.sampled == "bypass":
            return "sampled"
        return "no-cache" if call.directives.no_cache else None

    async def _draw_variant(self, call: Call) -> tuple[Key, Outcome]:
        """One of the answers kept for a sampled request; the first gap, while there are fewer than wanted."""
        hits: list[tuple[Key, Outcome]] = []
        for number in range(self._settings.variants):
            key = call.key.variant(number)
            outcome = await self._look_up(key)
            if not isinstance(outcome, Hit):
                return key, outcome
            hits.append((key, outcome))
        return random.choice(hits)  # noqa: S311  # which answer to repeat is no secret

    async def _look_up(self, key: Key) -> Outcome:
        outcome = await self._cache.lookup(key)
        _count(outcome)
        return outcome


def _is_within(grace: float, call: Call, hit: Hit) -> bool:
    """Whether a stale entry is at most `grace` seconds past its lifetime, and the client set no limit of its own."""
    unlimited = hit.age <= call.directives.max_age and call.directives.min_fresh == 0
    return hit.stale and unlimited and hit.age < hit.entry.fresh_for + grace


def _count(outcome: Outcome) -> None:
    match outcome:
        case Hit(tier="memory"):
            metrics.tier_lookups.labels("memory", "hit").inc()
        case Hit(tier="redis"):
            metrics.tier_lookups.labels("memory", "miss").inc()
            metrics.tier_lookups.labels("redis", "hit").inc()
        case Miss(tiers):
            for tier in tiers:
                metrics.tier_lookups.labels(tier, "miss").inc()
        case Failed():
            metrics.tier_lookups.labels("memory", "miss").inc()
            metrics.tier_lookups.labels("redis", "failed").inc()
