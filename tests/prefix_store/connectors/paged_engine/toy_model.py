"""A model whose keys and values tell which tokens they were computed from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

BLOCK = 4
"""Tokens in a block."""
LAYERS, HEADS, CONTENT = 2, 2, 2
VOCABULARY = 1_000
STOP = 13
"""An answer ends with this token."""

Numbers = npt.NDArray[np.float32]


class Sequence:
    """The tokens of a request as a worker knows them, and what a model makes of them.

    Args:
        seed: of the model's weights.
        tokens: from the first one on.
    """

    def __init__(self, seed: int, tokens: list[int]) -> None:
        self.tokens = list(tokens)
        self._states = [xxhash.xxh3_64_digest(str(seed).encode())]
        self._numbers: dict[int, list[Numbers]] = {}

    def numbers(self, until: int, rank: int) -> Numbers:
        """Keys and values of the first tokens in one worker's part: [tokens, layers, heads, content]."""
        known = self._numbers.setdefault(rank, [])
        for place in range(len(known), until):
            digest = xxhash.xxh3_64_digest(self._state(place + 1) + bytes([rank]))
            known.append(np.frombuffer(digest, np.uint8).astype(np.float32).reshape(LAYERS, HEADS, CONTENT))
        return np.stack(known[:until]) if until else np.empty((0, LAYERS, HEADS, CONTENT), np.float32)

    def next_token(self) -> int:
        """What follows all tokens."""
        return int.from_bytes(self._state(len(self.tokens)), "little") % VOCABULARY

    def _state(self, count: int) -> bytes:
        """A digest of so many tokens."""
        while len(self._states) <= count:
            token = self.tokens[len(self._states) - 1]
            self._states.append(xxhash.xxh3_64_digest(self._states[-1] + token.to_bytes(4, "little")))
        return self._states[count]


def answer_of(seed: int, prompt: list[int], max_tokens: int) -> list[int]:
    """What the model answers."""
    sequence = Sequence(seed, prompt)
    while len(sequence.tokens) < len(prompt) + max_tokens:
        sequence.tokens.append(sequence.next_token())
        if sequence.tokens[-1] == STOP:
            break
    return sequence.tokens[len(prompt) :]
