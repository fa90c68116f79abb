"""What a client says about reuse: the request directives of Cache-Control (RFC 9111, section 5.2.1)."""

import math
from dataclasses import dataclass

from cache.entries.outcomes import Hit


@dataclass(frozen=True, slots=True)
class Directives:
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


NONE = Directives()


def parse_cache_control(header: str) -> Directives:
    """Unknown directives are ignored, as the RFC asks; a number that is none counts as the strictest one."""
    if not header:
        return NONE
    said: dict[str, str] = {}
    for part in header.split(","):
        name, _, value = part.strip().partition("=")
        said[name.strip().lower()] = value.strip().strip('"')
    return Directives(
        no_cache="no-cache" in said,
        no_store="no-store" in said,
        only_if_cached="only-if-cached" in said,
        max_age=_seconds(said["max-age"], 0.0) if "max-age" in said else math.inf,
        min_fresh=_seconds(said["min-fresh"], math.inf) if "min-fresh" in said else 0.0,
        max_stale=_seconds(said["max-stale"] or "inf", 0.0) if "max-stale" in said else 0.0,
    )


def _seconds(text: str, otherwise: float) -> float:
    if text == "inf":
        return math.inf
    return float(text) if text.isascii() and text.isdigit() else otherwise
