"""What a client asks of the cache: directives of Cache-Control (RFC 9111, section 5.2.1), and tags for its answer."""

import math
import re
from dataclasses import dataclass

from multidict import CIMultiDictProxy, istr

from cache.entries.outcomes import Hit
from gateway.errors import InvalidRequest

TAGS_HEADER = "x-keepgate-tags"
_TAGS_NAME = istr(TAGS_HEADER)  # looked up twice as fast as a plain string
_MAX_TAGS = 16
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")


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


def tags_of(headers: CIMultiDictProxy[str]) -> tuple[str, ...]:
    """What the client calls the answer to its request, for a purge of all answers of a name. Raises InvalidRequest."""
    if _TAGS_NAME not in headers:
        return ()
    given = (tag.strip() for line in headers.getall(TAGS_HEADER) for tag in line.split(","))
    tags = tuple(dict.fromkeys(tag for tag in given if tag))  # a list may have empty elements (RFC 9110, section 5.6.1)
    if len(tags) > _MAX_TAGS or not all(map(is_tag, tags)):
        raise InvalidRequest(
            f"'{TAGS_HEADER}' must be at most {_MAX_TAGS} names with commas between, each of up to 128 "
            "letters, digits and ._:/@-, of which the first is a letter or digit, such as docs-v7, tenant:acme.",
            param=TAGS_HEADER,
        )
    return tags


def is_tag(text: str) -> bool:
    """Whether a request can have this tag."""
    return _TAG.fullmatch(text) is not None


def _seconds(text: str, otherwise: float) -> float:
    if text == "inf":
        return math.inf
    return float(text) if text.isascii() and text.isdigit() else otherwise
