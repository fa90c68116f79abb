"""Drafts that a smaller model with the same vocabulary writes."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, SequenceRows, pack
from backend.engine.sampler import distribution, draw_from
from backend.engine.sequence import Draft, Sequence

DRAFT_MODEL = "draft-model"

_WEIGHT = 1 / 16
"""Of a new measurement in the time of a token."""


@dataclass(slots=True)
class _Written:
    """What the draft model has computed of a sequence."""

    token_ids: list[int] = field(default_factory=list)
    """Whose keys and values are in its memory, at the places where the target has them."""
    blocks: list[int] = field(default_factory=list)
    """Those that they are in."""


class DraftModel:
    """A model whose keys and values lie in blocks of the same numbers as the target's.

    So a sequence has room for both or for neither, and what is shared, preempted and evicted there is here too. What it
    computed of a full block is known by the block's key, and is used by other sequences as the target's is. A block
    that it has not computed is computed when a draft of its sequence is wanted.

    Args:
        runner: with as many blocks as the target's runner.
        vocab_size: of the target; tokens from there on are not proposed.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self._target_size = vocab_size
        self._vocab_size = min(vocab_size, runner.config.vocab_size)
        self._sequences: dict[int, _Written] = {}
        self._contents: dict[int, bytes] = {}
        self._random = random.Random()  # noqa: S311 - what it proposes is not what is drawn
        self.seconds_per_token = 0.0
        """Of each token that is written for all sequences at once; 0 until one was."""

    def write(self, lengths: Mapping[Sequence, int]) -> dict[int, Draft]:
        """Drafts by sequence id, each of so many tokens at most.

        A sequence of which much has to be computed first may get none: a call computes as many tokens as suit the
        runner for a step.

        Args:
            lengths: tokens for which the sequences have room after their last one.
        """
        behind: dict[Sequence, SequenceRows] = {}
        budget = self._runner.step_tokens
        for sequence, length in lengths.items():
            begin = self._catch_up(sequence)
            tokens = sequence.tokens[begin : begin + budget]
            if length and tokens:
                behind[sequence] = SequenceRows(tokens, begin, sequence.blocks)
                budget -= len(tokens)
        drafts: dict[Sequence, _Draft] = {}
        rows = behind
        ready = [s for s, own in behind.items() if own.start + len(own.token_ids) == s.num_tokens]
        while rows:
            started = time.perf_counter()
            logits = self._compute(rows, ready)
            writing = rows is not behind
            rows = {}
            for sequence, row in zip(ready, logits, strict=True):
                draft = drafts.setdefault(sequence, _Draft())
                draft.add(row[: self._vocab_size], sequence, self._random)
                if len(draft.token_ids) < lengths[sequence]:
                    place = sequence.num_tokens + len(draft.token_ids) - 1
                    rows[sequence] = SequenceRows(draft.token_ids[-1:], place, sequence.blocks)
            ready = list(rows)
            if writing or not self.seconds_per_token:
                elapsed = time.perf_counter() - started
                weight = _WEIGHT if self.seconds_per_token else 1.0
                self.seconds_per_token += weight * (elapsed - self.seconds_per_token)
        return {sequence.id: draft.finished(self._target_size) for sequence, draft in drafts.items()}

    def forget(self, sequence_id: int) -> None:
        """Notes that a sequence has ended."""
        self._sequences.pop(sequence_id, None)

    def _compute(self, rows: Mapping[Sequence, SequenceRows], ready: list[Sequence]) -> list[npt.NDArray[np.float32]]:
        """Logits after the last row of those that are ready, and the keys and values of all."""
        wanted, end = [], 0
        for sequence, own in rows.items():
            end += len(own.token_ids)
            if sequence in ready:
                wanted.append(end - 1)
            self._note(sequence, own)
        computed = self._runner.run(pack(list(rows.values()), wanted)).logits
        return list(computed.float().cpu().numpy())

    def _note(self, sequence: Sequence, rows: SequenceRows) -> None:
        written = self._sequences[sequence.id]
        del written.token_ids[rows.start :]
        written.token_ids += rows.token_ids
        written.blocks = list(sequence.blocks)
        # Tokens of the sequence itself, not those of a draft, make a block's key.
        full = min(len(written.token_ids), sequence.num_computed) // BLOCK_SIZE
        for place in range(rows.start // BLOCK_SIZE, min(full, sequence.num_registered)):
            self._contents[sequence.blocks[place]] = sequence.block_keys[place]

    def _catch_up(self, sequence: Sequence) -> int:
        """The first token of the sequence that has to be computed; at least the last one has."""
        written = self._sequences.setdefault(sequence.id, _Written())
        same = _common(written.blocks, sequence.blocks) * BLOCK_SIZE
        kept = min(same, _common(written.token_ids, sequence.tokens))
        shared = 0
        for block, key in zip(sequence.blocks, sequence.block_keys[: sequence.num_registered], strict=False):
            if self._contents.get(block) != key:
                break
            shared += BLOCK_SIZE
        begin = min(max(kept, shared), sequence.num_tokens - 1)
        written.token_ids = sequence.tokens[:begin]
        written.blocks = list(sequence.blocks)
        return begin


class _Draft:
    """A draft under construction."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._probabilities: list[npt.NDArray[np.float32]] = []

    def add(self, row: npt.NDArray[np.float32], sequence: Sequence, generator: random.Random) -> None:
        """Chooses the next token by the draft model's logits.

        It is drawn as the sequence draws its own, so that as many as possible are accepted; the best one is taken where
        the sequence takes the best one, and where it has a seed: then an answer must not depend on drafts.
        """
        params = sequence.params
        if params.temperature > 0 and params.seed is None and np.isfinite(row).all():
            drawn_from = distribution(row, params)
            self._probabilities.append(drawn_from)
            self.token_ids.append(draw_from(drawn_from, generator.random()))
        else:
            self.token_ids.append(int(np.nan_to_num(row, nan=-np.inf).argmax()))

    def finished(self, vocab_size: int) -> Draft:
        """The draft, for a target with so many rows of logits."""
        # A row that was not finite has no distribution; what follows it is left out.
        if not self._probabilities:
            return Draft(DRAFT_MODEL, tuple(self.token_ids))
        probabilities = np.zeros((len(self._probabilities), vocab_size), dtype=np.float32)
        for place, row in enumerate(self._probabilities):
            probabilities[place, : row.size] = row
        return Draft(DRAFT_MODEL, tuple(self.token_ids[: len(probabilities)]), probabilities)


def _common(first: list[int], second: list[int]) -> int:
    """Length of the longest beginning that both have."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
