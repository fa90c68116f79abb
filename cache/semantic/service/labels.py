"""Labels for the policy: every process learns the same ones in the same order."""

import logging

import msgspec

from cache.semantic.policy.label import Label, decode_label, encode_label
from cache.semantic.policy.policy import Policy
from cache.semantic.policy.state import UnusableState

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, bytes]).decode


class Labels:
    """A policy and its labels. `name` separates labels of other policies and other embedding models."""

    def __init__(self, policy: Policy, name: str) -> None:
        self.name = name
        self.count = 0
        self._policy = policy

    def encode(self, label: Label) -> bytes:
        return _encode((self.name, encode_label(label)))

    def take(self, data: bytes) -> None:
        """Learns a label that `encode` of any process wrote; ignores what this policy cannot use."""
        try:
            name, label = _decode(data)
            if name == self.name:
                self.learn(decode_label(label))
        except (msgspec.DecodeError, UnicodeDecodeError, UnusableState) as error:
            log.warning("ignoring a label in redis: %s", error)

    def learn(self, label: Label) -> None:
        self._policy.learn(label)
        self.count += 1

    def settle(self, label: Label) -> None:
        """Records the label of an answer that this process served."""
        self._policy.settle(label)

    def snapshot(self) -> bytes:
        return self._policy.snapshot()

    def restore(self, state: bytes) -> bool:
        """Loads another process's state; False if the policy cannot use it."""
        try:
            self._policy.restore(state)
        except UnusableState as error:
            log.warning("beginning anew: what is in redis cannot be used: %s", error)
            return False
        return True
