"""Speculators for tests: one that knows what comes and lies at times, and the real one where everything pays."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from backend.engine.scheduler import Chunk
from backend.engine.sequence import Draft, Sequence
from backend.speculation.draft_model import DraftModel
from backend.speculation.medusa import MedusaHeads, MedusaWeights
from backend.speculation.speculator import AdaptiveSpeculator
from backend.speculation.step_costs import StepCosts

VOCABULARY = 160
"""Of every model that a `Foresight` drafts for."""

FREE_ROWS = {1: 1.0, 32: 1.0}
"""Seconds of steps by rows, if a row costs nothing: every draft pays."""


def eager(draft_model: DraftModel | None = None, medusa: MedusaHeads | None = None) -> AdaptiveSpeculator:
    """A speculator that always finds that drafts pay."""
    return AdaptiveSpeculator(StepCosts(FREE_ROWS, FREE_ROWS), draft_model, medusa)


def random_heads(size: int) -> MedusaHeads:
    """Heads on states of this many numbers that guess at random, now and then right."""
    numbers = torch.Generator().manual_seed(4)
    return MedusaHeads(
        MedusaWeights(
            blocks=torch.randn(3, size, size, generator=numbers) / size**0.5,
            biases=torch.zeros(3, size),
            output=torch.randn(40, size, generator=numbers),
            token_ids=torch.arange(40) + 10,
        )
    )


@dataclass
class Foresight:
    """Drafts of the tokens that will come, with some of them wrong.

    Args:
        known: whole token sequences by sequence id; of others it proposes random tokens.
        drawn: whether drafts say that they were drawn, from a distribution that has them with any probability.
        branches: whether drafts branch: wrong tokens lie between the right ones, as their neighbours or after them.
    """

    known: Mapping[int, list[int]]
    seed: int
    drawn: bool = False
    branches: bool = False
    wants_states: bool = True
    proposed: int = 0
    recorded: int = 0
    forgotten: set[int] = field(default_factory=set)
    states: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    """By sequence id and number of tokens: what the last one was sampled from."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311

    def propose(self, chunks: list[Chunk], room: int, reserve: Callable[[Sequence, int], int]) -> dict[int, Draft]:
        """See `Speculator`; now and then for chunks that cannot have one too, and longer than there is room."""
        drafts = {}
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.pooled or self._random.random() < 0.2:
                continue
            coming = self.known.get(sequence.id, [])[sequence.num_tokens :]
            length = self._random.randint(1, 12)
            tokens = (coming + [self._random.randrange(VOCABULARY) for _ in range(length)])[:length]
            wrong = self._random.randrange(2 * length)
            if wrong < length:
                tokens[wrong] = self._random.randrange(VOCABULARY)
            if self.branches:
                drafts[sequence.id] = self._tree(tokens)
                continue
            probabilities = self._distributions(tokens) if self.drawn and sequence.params.temperature else None
            drafts[sequence.id] = Draft("foresight", tuple(tokens), probabilities)
            self.proposed += length
        return drafts

    def _tree(self, tokens: list[int]) -> Draft:
        """A tree in which these tokens are a path, at random places."""
        ids: list[int] = []
        parents: list[int] = []
        last = -1
        for token in tokens:
            for _ in range(self._random.randint(0, 3)):
                ids.append(self._random.randrange(VOCABULARY))
                parents.append(self._random.randint(-1, len(parents) - 1))
            ids.append(token)
            parents.append(last)
            last = len(ids) - 1
            self.proposed += 1
        return Draft("foresight", tuple(ids), parents=tuple(parents))

    def wants_step(self, chunks: list[Chunk]) -> bool:
        """See `Speculator`."""
        return self._random.random() < 0.5

    def record(self, chunks: list[Chunk], tokens: int, seconds: float) -> float:
        """See `Speculator`."""
        assert seconds > 0
        assert tokens >= 0
        self.recorded += 1
        return seconds

    def note_state(self, sequence: Sequence, state: torch.Tensor) -> None:
        """See `Speculator`."""
        self.states.setdefault(sequence.id, {})[sequence.num_tokens] = state.clone()

    def forget(self, sequence_id: int) -> None:
        """See `Speculator`."""
        self.forgotten.add(sequence_id)

    def _distributions(self, tokens: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        rows = np.full((len(tokens), VOCABULARY), 0.1, dtype=np.float32)
        rows[np.arange(len(tokens)), tokens] = self._random.choice([0.1, 50.0])
        rows /= rows.sum(axis=1, keepdims=True)
        return rows
