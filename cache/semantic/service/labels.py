"""Labels on their way to the policy: every process learns the same ones in the same order."""

import logging

import msgspec

from cache.semantic.policy.label import Label, decode_label, encode_label
from cache.semantic.policy.policy import Policy
from cache.semantic.policy.state import UnusableState

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, bytes]).decode


class Labels:
    """A policy and what it learns. `name` sets apart what other policies and other embedding models learn."""

    def __init__(self, policy: Policy, name: str) -> None:
        self.name = name
        self.count = 0
        self._policy = policy

    def encode(self, label: Label) -> bytes:
        return _encode((self.name, encode_label(label)))

    def take(self, data: bytes) -> None:
        """Learn a label that `encode` wrote, in whatever process; ignore what this policy cannot use."""
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
        """Book what was found of an answer that this process served."""
        self._policy.settle(label)

    def snapshot(self) -> bytes:
        return self._policy.snapshot()

    def restore(self, state: bytes) -> bool:
        """Whether the policy could take over what another process had learned."""
        try:
            self._policy.restore(state)
        except UnusableState as error:
            log.warning("beginning anew: what is in redis cannot be used: %s", error)
            return False
        return True
