"""Decides which tokens of which sequences the next step computes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from backend.block_pool import BlockPool
from backend.runner import BLOCK_SIZE
from backend.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, start + count)`` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def reaches_end(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.start + self.count == self.sequence.num_tokens


class Scheduler:
    """One rule: a sequence has ``num_computed`` of ``num_tokens``, and a step computes at most ``step_tokens``.

    Decoding is the case of one missing token, prefill of many, a chunked prefill is what the budget leaves over,
    and a preempted sequence is one with nothing computed. Running sequences come first, in order of arrival; when
    blocks run out the youngest gives its own back and starts again later, so the oldest always gets to its end.
    """

    def __init__(self, pool: BlockPool, max_batch: int, step_tokens: int) -> None:
        self._pool = pool
        self._max_batch = max_batch
        self._step_tokens = max(step_tokens, max_batch)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. The caller has checked that it can fit the pool on its own."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence, waiting or running, and frees its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def schedule(self) -> list[Chunk]:
        """Chooses the next step's chunks and gives each sequence the blocks it needs for them.

        Empty only if there is nothing to do.
        """
        chunks: list[Chunk] = []
        budget = self._step_tokens
        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            count = min(sequence.num_tokens - sequence.num_computed, budget)
            if not self._reserve(sequence, count):
                break  # it was the youngest and has preempted itself
            chunks.append(Chunk(sequence, sequence.num_computed, count))
            budget -= count
            index += 1
        while self.waiting and budget and len(self.running) < self._max_batch:
            sequence = self.waiting[0]
            # Admission: room for the whole prompt and one more block, or the prefill may be thrown away soon.
            wanted = _blocks_for(sequence.num_tokens) + (1 if self.running else 0)
            if wanted > self._pool.num_free:
                break
            count = min(sequence.num_tokens, budget)
            self.running.append(self.waiting.popleft())
            if not self._reserve(sequence, count):
                raise RuntimeError("an admitted sequence found no blocks")
            chunks.append(Chunk(sequence, 0, count))
            budget -= count
        return chunks

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Extends the sequence's blocks for ``count`` more tokens, preempting younger ones as needed."""
        missing = _blocks_for(sequence.num_computed + count) - len(sequence.blocks)
        while missing > self._pool.num_free:
            youngest = self.running.pop()
            self._release(youngest)
            self.waiting.appendleft(youngest)
            self.num_preemptions += 1
            if youngest is sequence:
                return False
        if missing > 0:
            sequence.blocks += self._pool.allocate(missing) or []
        return True

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
