"""The request directives of Cache-Control (RFC 9111, section 5.2.1)."""

import math
from dataclasses import dataclass

from cache.entries.outcomes import Hit


@dataclass(frozen=True, slots=True)
class CacheControl:
    """Seconds; `max_stale` is infinite where the client names no limit."""

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    max_age: float = math.inf
    min_fresh: float = 0.0
    max_stale: float = 0.0

    def accepts(self, hit: Hit) -> bool:
        """Whether the client takes this answer without asking the upstream."""
        if self.no_cache or hit.age > self.max_age:
            return False
        remaining = hit.entry.fresh_for - hit.age
        return remaining >= self.min_fresh if not hit.stale else -remaining <= self.max_stale and self.min_fresh == 0


NONE = CacheControl()


def parse_cache_control(header: str) -> CacheControl:
    """Unknown directives are ignored, as the RFC asks; an invalid number counts as the strictest one."""
    if not header:
        return NONE
    given: dict[str, str] = {}
    for part in header.split(","):
        name, _, value = part.strip().partition("=")
        given[name.strip().lower()] = value.strip().strip('"')
    return CacheControl(
        no_cache="no-cache" in given,
        no_store="no-store" in given,
        only_if_cached="only-if-cached" in given,
        max_age=_seconds(given["max-age"], 0.0) if "max-age" in given else math.inf,
        min_fresh=_seconds(given["min-fresh"], math.inf) if "min-fresh" in given else 0.0,
        max_stale=_seconds(given["max-stale"] or "inf", 0.0) if "max-stale" in given else 0.0,
    )


def _seconds(text: str, otherwise: float) -> float:
    if text == "inf":
        return math.inf
    return float(text) if text.isascii() and text.isdigit() else otherwise
