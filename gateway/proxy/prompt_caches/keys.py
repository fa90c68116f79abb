"""The `prompt_cache_key` of a request: requests with the same one go to the same machine of the upstream.

OpenAI leads a prompt to a machine by its first 256 tokens and this key, and spreads what is more than 15 requests a
minute over further machines, at random. Each of them has a cache of its own. So the key names the tenant and what comes
before the conversation, and above that rate one of several shares of the conversations, each below the rate: a
conversation stays on a machine that has seen its beginning.
"""

from collections import OrderedDict
from collections.abc import Callable

import xxhash

PER_MINUTE = 15
"""Requests that one machine takes of one beginning and key."""

_MAX_BEGINNINGS = 2**12
_MINUTE = 60.0
_GROWS_AT = 2
_SHRINKS_AT = 4


class _Beginning:
    """How many requests of one beginning came in the current minute, and into how many shares they are cut."""

    __slots__ = ("began", "count", "shares")

    def __init__(self, began: float) -> None:
        self.began = began
        self.count = 0
        self.shares = 1

    def add(self, now: float) -> int:
        """Count one more request. Returns the number of shares, a power of two: half of a share stays where it is."""
        minutes = (now - self.began) // _MINUTE
        if minutes >= 1:
            # Late and by one step: conversations that move read nothing once.
            if self.shares > 1 and self.count * _SHRINKS_AT < PER_MINUTE * self.shares:
                self.shares //= 2
            self.count = 0
            self.began += minutes * _MINUTE
        self.count += 1
        if self.count > PER_MINUTE * self.shares * _GROWS_AT:
            self.shares *= 2
        return self.shares


class CacheKeys:
    """Makes keys by the rates of the requests of this process; the beginnings that come least are forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._beginnings: OrderedDict[bytes, _Beginning] = OrderedDict()

    def key(self, tenant: str, beginning: bytes, conversation: bytes) -> str:
        """The key of a request. The digests are of what comes before its conversation, and of the first turn."""
        now = self._clock()
        name = tenant.encode("utf-8", "surrogateescape") + b"\n" + beginning
        known = self._beginnings.get(name)
        if known is None:
            known = self._beginnings[name] = _Beginning(now)
            if len(self._beginnings) > _MAX_BEGINNINGS:
                self._beginnings.popitem(last=False)
        self._beginnings.move_to_end(name)
        share = xxhash.xxh3_64_intdigest(conversation) % known.add(now)
        return xxhash.xxh3_128_hexdigest(name + b"\n%d" % share)
