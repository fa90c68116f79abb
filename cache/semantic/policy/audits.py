"""Which hits are audited: more of the doubtful ones, and never more than the operator allows."""

import math
import random

# Tokens that may be saved up for a time with many hits, in requests.
_SAVED_REQUESTS = 500
_MIN_BURST = 2.0
# Most audits go to all hits alike, the rest to the doubtful ones; and near an empty bucket chances fall to a half
# before they end: the bound is as wide as the most that any hit may stand for.
_EVENLY = 0.7
_MIN_SCALE = 0.5
_TYPICAL_RISK = 0.01
_MIN_RISK = 1e-4
# Over about so many requests it is learned how much there is to audit.
_MEMORY = 500.0


class AuditLoad:
    """Draws audits, at most `share` of all requests and a few: over any n requests, share * n + burst of them.

    Where a sum of noughts and ones is estimated from a sample, the best chance to be drawn is proportional to the
    standard deviation of each (Neyman), here the root of the risk. The chances are scaled so that the share is used up
    and the tokens stay in the middle of their bucket:

        tokens  0 ─── 1 ──────── burst / 2 ──────── burst
        scale     0   │ 1/2 or more    1   rises to 2

    Args:
        share: of all requests, [0, 1].
    """

    def __init__(self, share: float, chance: random.Random) -> None:
        self._share = share
        self._chance = chance
        self._burst = max(_MIN_BURST, share * _SAVED_REQUESTS)
        self._tokens = 0.0
        # The wish to audit, per request; it begins low, because the first hits are the ones that are known least.
        self._wish = 0.2

    def request(self) -> None:
        """Each request brings its share of an audit."""
        self._tokens = min(self._burst, self._tokens + self._share)
        self._wish -= self._wish / _MEMORY

    def draw(self, risk: float) -> tuple[bool, float]:
        """Whether a hit of this plain risk is audited, which takes a token, and the probability of that."""
        wish = _EVENLY + (1.0 - _EVENLY) * math.sqrt(max(risk, _MIN_RISK) / _TYPICAL_RISK)
        self._wish += wish / _MEMORY
        scale = max(_MIN_SCALE, self._tokens / (self._burst / 2))
        chance = 0.0 if self._tokens < 1.0 else min(1.0, scale * wish * self._share / self._wish)
        drawn = self._chance.random() < chance
        self._tokens -= drawn
        return drawn, chance
