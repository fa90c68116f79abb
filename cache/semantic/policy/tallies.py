"""How often the cache was wrong, as audits show: an estimate, and a bound that holds with 95 % confidence."""

import math
import operator
from collections import deque
from statistics import NormalDist
from typing import NamedTuple

import msgspec
from msgspec.structs import astuple

from cache.semantic.policy.policy import Decision, JudgeError, Label

CONFIDENCE = 0.95
WINDOW = 10_000
"""Requests of the recent window, give or take a tenth."""

_SLICES = 10


class WrongShare(NamedTuple):
    """Wrong answers per request: an unbiased estimate, cut to [0, 1], and its upper bound."""

    estimate: float
    upper: float


class Tally(msgspec.Struct, array_like=True):
    """What is counted of some requests; tallies of processes and of times add up to one of all.

    `weight` is the sum of 1 / chance over audits that found a wrong answer (so many hits each stands for), `squares`
    that of the squares; `heaviest` is the most that any hit may stand for, audited or not. `unwatched` are hits that no
    audit could have found. `drawn` are audits that were to be, `audits` those of which a judgement came.
    """

    requests: int = 0
    hits: int = 0
    unwatched: int = 0
    drawn: int = 0
    audits: int = 0
    found_wrong: int = 0
    complaints: int = 0
    weight: float = 0.0
    squares: float = 0.0
    heaviest: float = 0.0

    def count_request(self, decision: Decision) -> None:
        self.requests += 1
        self.hits += decision.serve
        self.drawn += decision.serve and decision.audit
        if decision.serve and decision.audit_chance > 0.0:
            self.heaviest = max(self.heaviest, 1.0 / decision.audit_chance)
        elif decision.serve:
            self.unwatched += 1

    def count_label(self, label: Label) -> None:
        """Count the judgement of a hit: of an audit, or of one that a user complained of. Others are of no hits.

        Complaints are counted, and shown, for themselves: who sends a request again may be another one with the same
        question, and how many of those who got a wrong answer complain is not known.
        """
        self.complaints += label.source == "user" and not label.same
        if label.source == "audit":
            self.count_audit(label.same, label.chance)

    def count_audit(self, same: bool, chance: float) -> None:
        """Count the judgement of a hit that was drawn by `chance`, above 0."""
        self.audits += 1
        if not same:
            stands_for = 1.0 / chance
            self.found_wrong += 1
            self.weight += stands_for
            self.squares += stands_for * stands_for

    def __add__(self, other: "Tally") -> "Tally":
        """What both have counted."""
        both = Tally(*map(operator.add, astuple(self), astuple(other)))
        both.heaviest = max(self.heaviest, other.heaviest)
        return both

    def wrong_share(self, judge: JudgeError) -> WrongShare:
        """How many of the requests got a wrong answer.

        The estimate is that of Horvitz and Thompson; the bound is the gamma interval for weighted sums of Poisson
        counts (Fay and Feuer, Statistics in Medicine 16, 1997), its quantile as Wilson and Hilferty's. Before the first
        request nothing is known, and the bound is 1; it is never more than the hits. Audits without a judgement (the
        judge gave no verdict, or the upstream failed) are taken to be like the others. The judge's own mistakes are
        taken off; one whose recall is better than said makes both too low, by that times the hits.
        """
        if not self.requests:
            return WrongShare(0.0, 1.0)
        weight = self.weight + self.heaviest
        squares = self.squares + self.heaviest * self.heaviest
        most = math.inf
        if self.audits and weight:
            most = squares / weight * gamma_quantile(weight * weight / squares, CONFIDENCE)
        drawn_per_audit = max(1.0, self.drawn / max(self.audits, 1))
        watched = max(self.hits - self.unwatched, 1)
        estimate, upper = (
            self.hits * judge.wrong_among(found * drawn_per_audit / watched) / self.requests
            for found in (self.weight, most)
        )
        return WrongShare(estimate, max(estimate, upper))


class Tallies:
    """The tallies of one process: of all its requests, and of about the last WINDOW of them.

    oldest ── slice ── slice ── … ── slice being filled
              each of WINDOW / 10 requests; together they are the recent ones
    """

    def __init__(self) -> None:
        self.all = Tally()
        self._slices: deque[Tally] = deque([Tally()], maxlen=_SLICES)

    @property
    def recent(self) -> Tally:
        """A new tally of the recent requests."""
        return sum(self._slices, Tally())

    def count_request(self, decision: Decision) -> None:
        """Count a request; each one that is decided, once."""
        if self._slices[-1].requests >= WINDOW // _SLICES:
            self._slices.append(Tally())
        self.all.count_request(decision)
        self._slices[-1].count_request(decision)

    def count_label(self, label: Label) -> None:
        """Count a judgement of what this process has served; it counts as recent when it comes."""
        self.all.count_label(label)
        self._slices[-1].count_label(label)


def gamma_quantile(shape: float, share: float) -> float:
    """The quantile of the gamma distribution with scale 1 (Wilson and Hilferty's): within 1 % for a shape of 1 or
    more, and 5 or 6 % too low for one of .3, at .95 and .97.
    """
    ninth = 1.0 / (9.0 * shape)
    return float(shape * (1.0 - ninth + NormalDist().inv_cdf(share) * math.sqrt(ninth)) ** 3)
