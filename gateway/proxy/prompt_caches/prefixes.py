"""Which prefixes of prompts come again, and which of them a breakpoint pays for.

A prompt is a chain of prefixes: to the end of its tools, of its system prompt, of each message. Anthropic bills what it
writes to its cache at 1.25 times the price of the input, and what it reads at 0.1 times. A breakpoint costs 0.25 more
for each token that is written, and saves 0.9 with each reading within the TTL. So it pays if the probability that the
prefix comes again within the TTL is more than 0.25 / 0.9, whatever its length: `BREAK_EVEN`.

That probability is a share that is counted: of the tenant's prefixes of the same kind, those that came again in time.
The kinds are the end of a first, a second, and a later turn; a prefix that came a second time; and one that had come
again before it was away for longer than the TTL. Shares begin at a prior and follow the traffic: counts are halved
again and again. A prefix that came a third time within the TTL has paid already.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WRITE_PRICE, READ_PRICE = 1.25, 0.1
"""Of a token, relative to one that is neither written nor read."""
BREAK_EVEN = (WRITE_PRICE - 1) / (1 - READ_PRICE)
TTL = 300.0
"""Seconds for which a prefix is kept after its last use."""

_MAX_PREFIXES = 2**16
_MAX_TENANTS = 2**10
_HALVED_AT = 256.0
# Kinds: the ends of turns are those below _TURNS.
_TURNS = 3
_SECOND, _RETURNED, _INNER = _TURNS, _TURNS + 1, _TURNS + 2


class _Share:
    """How many of the prefixes of a kind came again; it begins at `again` of `seen`."""

    __slots__ = ("again", "seen")

    def __init__(self, again: float, seen: float) -> None:
        self.again = again
        self.seen = seen

    def add(self) -> None:
        self.seen += 1
        if self.seen > _HALVED_AT:
            self.seen /= 2
            self.again /= 2

    @property
    def pays(self) -> bool:
        return self.again > BREAK_EVEN * self.seen


class _Prefix:
    __slots__ = ("count", "kind", "used")

    def __init__(self, kind: int, used: float) -> None:
        self.count = 1  # within the TTL of one another
        self.kind = kind
        self.used = used


def _shares() -> list[_Share]:
    # Of new ends, three of a few have to come again first. What came twice is marked until that has failed often.
    return [*(_Share(1, 10) for _ in range(_TURNS)), _Share(1, 2), _Share(1, 2)]


@dataclass(slots=True)
class _Tenant:
    prefixes: OrderedDict[bytes, _Prefix] = field(default_factory=OrderedDict)
    shares: list[_Share] = field(default_factory=_shares)


class PrefixStatistics:
    """The prefixes of one process' requests, apart by tenant; the least used are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_prefixes: int = _MAX_PREFIXES) -> None:
        self._clock = clock
        self._max_prefixes = max_prefixes
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def see(self, tenant: str, digests: Sequence[bytes], head: int) -> list[int]:
        """Count the prefixes of a prompt, from the shortest on. Returns the indices of those that pay, ascending.

        The first `head` of them are tools and the system prompt. At most three are returned: the longest that is head,
        for other conversations, and the two longest of all: mostly what the turn before wrote, which may be too far
        back for the upstream to look, and the end of the prompt.
        """
        known = self._tenant(tenant)
        paying = [index for index, prefix in enumerate(self._seen(known, digests)) if _pays(prefix, known.shares)]
        self._forget()
        return sorted({*[index for index in paying if index < head][-1:], *paying[-2:]})

    def _tenant(self, name: str) -> _Tenant:
        known = self._tenants.get(name)
        if known is None:
            known = self._tenants[name] = _Tenant()
            if len(self._tenants) > _MAX_TENANTS:
                self._count -= len(self._tenants.popitem(last=False)[1].prefixes)
        self._tenants.move_to_end(name)
        return known

    def _seen(self, tenant: _Tenant, digests: Sequence[bytes]) -> list[_Prefix]:
        """The prefixes of a prompt, with this time counted."""
        now = self._clock()
        seen: list[_Prefix] = []
        turn = 0
        for index, digest in enumerate(digests):
            prefix = tenant.prefixes.get(digest)
            self._count += prefix is None
            if prefix is not None and now - prefix.used <= TTL:
                turn += prefix.kind < _TURNS
                _came_again(prefix, tenant.shares)
                prefix.used = now
            else:
                kind = min(turn, _TURNS - 1) if index == len(digests) - 1 else _INNER
                if prefix is not None and (prefix.count > 1 or prefix.kind == _RETURNED):
                    kind = _RETURNED
                prefix = tenant.prefixes[digest] = _Prefix(kind, now)
                if kind != _INNER:
                    tenant.shares[kind].add()
            tenant.prefixes.move_to_end(digest)
            seen.append(prefix)
        return seen

    def _forget(self) -> None:
        """Halve the tenant with the most prefixes, so that none makes the others' be forgotten."""
        while self._count > self._max_prefixes:
            largest = max(self._tenants.values(), key=lambda tenant: len(tenant.prefixes))
            for _ in range((len(largest.prefixes) + 1) // 2):
                largest.prefixes.popitem(last=False)
                self._count -= 1


def _came_again(prefix: _Prefix, shares: list[_Share]) -> None:
    prefix.count += 1
    if prefix.count == 2:
        shares[_SECOND].add()
        if prefix.kind != _INNER:
            shares[prefix.kind].again += 1
    elif prefix.count == 3:
        shares[_SECOND].again += 1


def _pays(prefix: _Prefix, shares: list[_Share]) -> bool:
    """Whether a breakpoint at its end pays, from how often it came."""
    if prefix.count > 1:
        return prefix.count > 2 or shares[_SECOND].pays
    return prefix.kind != _INNER and shares[prefix.kind].pays
