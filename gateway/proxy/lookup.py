"""The exact lookup: whether the cache has an answer to a request, and whether it may be served."""

import random

from cache.entries.key import Key
from cache.entries.outcomes import Bypass, Failed, Hit, Miss, Outcome
from cache.exact import ExactCache
from cache.stores.recent_answers import RecentAnswers
from gateway import metrics
from gateway.proxy.inference_request import InferenceRequest
from gateway.settings.cache import CacheSettings
from gateway.tenants.policies import reads_cache

# Why a bypass stores its answer all the same: the request asks for a new one.
NO_CACHE = "no-cache"
REGENERATE = "regenerate"
ASKING_FOR_NEW = frozenset({NO_CACHE, REGENERATE})


class Lookup:
    """Applies the operator's settings and the client's Cache-Control to the exact cache."""

    def __init__(self, cache: ExactCache, settings: CacheSettings) -> None:
        self._cache = cache
        self._settings = settings
        self._recent = RecentAnswers(cache.redis, settings.regenerate)

    async def wants_another(self, inference: InferenceRequest, hit: Hit) -> bool:
        """Whether a client asks again for an answer that it has just got: it wants another (`cache.regenerate`)."""
        if not self._settings.regenerate or not inference.sampled or inference.cache_control.only_if_cached:
            return False
        return await self._recent.serve(hit.entry.id) or hit.age < self._settings.regenerate

    async def find(self, inference: InferenceRequest) -> tuple[Key, Outcome]:
        """The cache's outcome, and the key under which a new answer to this request is stored."""
        if reason := self.bypass_reason(inference):
            return inference.key, Bypass(reason)
        if inference.sampled and self._settings.sampled == "variants":
            return await self._draw_variant(inference)
        return inference.key, await self._look_up(inference.key)

    def finished(self, inference: InferenceRequest, key: Key, outcome: Outcome) -> Hit | None:
        """The answer to this request, if this process stored it since `outcome` and it may be served."""
        hit = None if isinstance(outcome, Bypass) else self._cache.in_memory(key)
        return hit if hit is not None and self.may_serve(inference, hit) else None

    def may_serve(self, inference: InferenceRequest, hit: Hit) -> bool:
        """Whether the entry may answer: fresh, or stale while it is revalidated (RFC 5861, section 3)."""
        if inference.needs_usage and not hit.entry.has_usage:
            return False
        return inference.cache_control.accepts(hit) or _is_within(self._settings.stale_while_revalidate, inference, hit)

    def stale_if_error_hit(self, inference: InferenceRequest, outcome: Outcome) -> Hit | None:
        """The stale entry that may be served when the upstream fails, if there is one (RFC 5861, section 4)."""
        if not isinstance(outcome, Hit) or (inference.needs_usage and not outcome.entry.has_usage):
            return None
        # It may have been purged while the upstream was asked.
        is_served = _is_within(self._settings.stale_if_error, inference, outcome) and self._cache.counts(outcome.entry)
        return outcome if is_served else None

    def bypass_reason(self, inference: InferenceRequest) -> str | None:
        """Why the cache is not asked; None if it is."""
        if not self._settings.enabled:
            return "disabled"
        if inference.cache_control.no_store:
            return "no-store"
        if not reads_cache(inference.caller):
            return "key"
        if inference.sampled and self._settings.sampled == "bypass":
            return "sampled"
        return NO_CACHE if inference.cache_control.no_cache else None

    async def _draw_variant(self, inference: InferenceRequest) -> tuple[Key, Outcome]:
        """One of the stored variants of a sampled request; a miss for the first one not stored yet."""
        hits: list[tuple[Key, Outcome]] = []
        for number in range(self._settings.variants):
            key = inference.key.variant(number)
            outcome = await self._look_up(key)
            if not isinstance(outcome, Hit):
                return key, outcome
            hits.append((key, outcome))
        return random.choice(hits)  # noqa: S311  # which answer to repeat is no secret

    async def _look_up(self, key: Key) -> Outcome:
        outcome = await self._cache.lookup(key)
        count_lookup(outcome)
        return outcome


def _is_within(grace: float, inference: InferenceRequest, hit: Hit) -> bool:
    """Whether a stale entry is at most `grace` seconds past its lifetime, and the client set no limit of its own."""
    unlimited = hit.age <= inference.cache_control.max_age and inference.cache_control.min_fresh == 0
    return hit.stale and unlimited and hit.age < hit.entry.fresh_for + grace


def count_lookup(outcome: Outcome) -> None:
    """Count the tiers that were asked."""
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
