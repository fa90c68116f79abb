"""Labels for the policy and pairs for the judge's errors: every process learns the same ones in the same order."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from cache.semantic.judge.error_rates import PAIR, ErrorRates, JudgedPair
from cache.semantic.policy.policy import EQUAL, LABEL, EqualAnswers, Label, Policy
from cache.semantic.policy.state import OtherVersion, UnusableState, freeze, thaw

log = logging.getLogger(__name__)


class Labels:
    """A policy and its labels, and the errors of the judge and the pairs that show them.

    `name` separates labels of other policies and other embedding models, `judge` the pairs of other judges.
    """

    def __init__(self, policy: Policy, errors: ErrorRates, name: str, judge: str) -> None:
        self.policy = policy
        self.errors = errors
        self.name = name
        self.count = 0
        self.of_other_versions: Counter[int] = Counter()
        """Labels that were ignored, by the version that has written them."""
        self._judge = judge
        # By type: the name that a process looks for, the kind for `freeze` and `thaw`, and who learns it.
        self._learners: dict[type, tuple[str, str, Callable[[Any], None]]] = {
            Label: (name, LABEL, policy.learn),
            JudgedPair: (judge, PAIR, errors.count),
            EqualAnswers: (f"answers of {name}", EQUAL, policy.join),  # a name that versions before it pass over
        }

    def encode(self, learned: Label | JudgedPair | EqualAnswers) -> bytes:
        name, kind, _ = self._learners[type(learned)]
        return msgspec.msgpack.encode((name, freeze(kind, learned)))

    def take(self, data: bytes) -> None:
        """Learns what `encode` of any process wrote; ignores what cannot be used here."""
        try:
            name, learned = msgspec.msgpack.decode(data, type=tuple[str, bytes])
            for of, (own_name, kind, _) in self._learners.items():
                if name == own_name:
                    self.learn(thaw(learned, kind, of))
        except OtherVersion as error:
            self.of_other_versions[error.version] += 1
            if self.of_other_versions[error.version] == 1:  # there may be as many as the stream is long
                log.warning("ignoring labels in redis: %s", error)
        except (msgspec.DecodeError, UnicodeDecodeError, UnusableState) as error:
            log.warning("ignoring a label in redis: %s", error)

    def learn(self, learned: Label | JudgedPair | EqualAnswers) -> None:
        _, _, learn = self._learners[type(learned)]
        learn(learned)
        self.count += 1

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode((self.policy.snapshot(), self._judge, self.errors.snapshot()))

    def restore(self, state: bytes) -> bool:
        """Loads another process's state; False if it cannot be used."""
        before = self.errors.snapshot()
        try:
            policy, judge, errors = msgspec.msgpack.decode(state, type=tuple[bytes, str, bytes])
            if judge == self._judge:
                self.errors.restore(errors)
            self.policy.restore(policy)
        except (msgspec.DecodeError, UnicodeDecodeError, UnusableState) as error:
            self.errors.restore(before)
            log.warning("beginning anew: what is in redis cannot be used: %s", error)
            return False
        return True
