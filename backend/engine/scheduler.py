"""Decides which tokens of which sequences the next step computes."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from backend.engine.block_manager import BlockManager
from backend.engine.block_pool import BlockPool
from backend.engine.config import Batching
from backend.engine.kv_connector import LoadRequest
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.sequence import Draft, Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, start + count)`` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int
    draft: Draft | None = None
    """Computed after them; only if the chunk reaches the sequence's end."""

    @property
    def num_rows(self) -> int:
        """Rows of the step, those of the draft included."""
        return self.count + (0 if self.draft is None else len(self.draft.token_ids))

    @property
    def reaches_end(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.start + self.count == self.sequence.num_tokens


class Scheduler:
    """One rule: a sequence has ``num_computed`` of ``num_tokens``, and a step computes at most ``step_tokens``.

    Decoding is the case of one missing token, prefill that of many. A chunked prefill is what the budget leaves of a
    prompt, a prefix hit starts with some tokens computed, and a preempted sequence has none computed.

    Order: smaller ``priority`` first, then order of arrival. When blocks run out, the last in this order is preempted:
    its blocks are released and it is recomputed later, so the first sequence always completes. Among priorities the
    order is strict: as long as there is enough work of a better priority, a worse one waits.

    Fairness of a step's budget: each sequence that lacks one token gets it, so a long prompt delays running answers
    by one step at most. Of the rest, at least half goes to the first prompt in order, which bounds how long any
    prompt takes; the rest goes to prompts by how little they lack, so that a short one does not wait for a long one.

    Memory: a sequence joins when there are blocks for all its tokens (those it shares do not count) and one more. The
    first that does not fit holds back those after it, or it might wait for ever. A sequence whose next block is being
    computed by another one waits for it, and shares it; so the answers to one prompt compute it once.

    What can be had from elsewhere sooner than it is computed is fetched into a sequence's blocks as it joins. Until
    that has ended, one way or another, steps leave the sequence out.

    Args:
        max_batch: sequences that run at the same time.
        step_tokens: tokens computed in one step at most; ``max_batch`` if that is more.
        shares_prefixes: whether sequences may use blocks that others have computed.
        window: tokens that a token sees at most, itself included; None: there is a layer in which it sees all.
        fetching: begins to fill a sequence's blocks, from the first that is not computed up to that with this number;
            None: it cannot.
        lossy_key: see ``BlockManager``.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_batch: int,
        step_tokens: int,
        batching: Batching = Batching(),  # noqa: B008 - frozen
        shares_prefixes: bool = True,
        window: int | None = None,
        fetching: Callable[[Sequence, int], LoadRequest | None] | None = None,
        lossy_key: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.max_batch = max_batch
        self.step_tokens = max(step_tokens, max_batch)
        self._batching = batching
        self._blocks = BlockManager(pool, self.step_tokens, shares_prefixes, window, lossy_key)
        self._fetching = fetching
        self._arrivals = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # The first waiting sequence does not fit, and since then no block was released and no sequence arrived.
        self._held_back = False
        # Nothing can be computed until a fetch or a copy has ended, and none has since this was found.
        self._stalled = False
        self.num_preemptions = 0
        self.prefix_cache_hits = 0
        self.prefix_cache_queries = 0

    def add(self, sequence: Sequence, now: float = 0.0) -> None:
        """Queues a sequence. The caller has checked that it can fit the pool on its own, see ``blocks_at_most``.

        Args:
            now: ``time.monotonic()``, in seconds.
        """
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.queued_at = now
        insort(self.waiting, sequence, key=_order)
        self.mark_changed()

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, waiting or running, and releases its blocks."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def seconds_until_work(self, now: float) -> float | None:
        """Seconds until a step has something to compute; None: not before a request, a fetch or a copy changes that."""
        if any(sequence.fetch is None for sequence in self.running):
            return 0.0
        return self._seconds_until_admission(now) if self.waiting and not self._stalled else None

    def schedule(self, now: float = 0.0) -> list[Chunk]:
        """Chooses the chunks of the next step and allocates the blocks they need.

        Empty only if there is nothing to compute, or if a dynamic batch waits for more sequences.
        """
        if self._extend_running() and self._has_slot() and self._seconds_until_admission(now) == 0.0:
            self._admit(now)
        chunks = self._distribute_budget()
        waits_for_news = bool(self.running) or self._held_back
        self._stalled = not chunks and waits_for_news and not (self.waiting and self._seconds_until_admission(now))
        return chunks

    def with_drafts(self, chunks: list[Chunk], drafts: Mapping[int, Draft]) -> list[Chunk]:
        """The chunks with the drafts of their sequences, and blocks for these.

        A draft takes what is left, and is shortened to it: no sequence is preempted for one, none waits for one, and a
        step still computes ``step_tokens`` at most.

        Args:
            chunks: as ``schedule`` chose them.
            drafts: by sequence id.
        """
        rows = self.step_tokens - sum(chunk.count for chunk in chunks)
        extended: list[Chunk] = []
        for chunk in chunks:
            draft = drafts.get(chunk.sequence.id)
            if draft is not None and chunk.reaches_end:
                draft = draft.shortened(self.reserve(chunk.sequence, min(rows, len(draft.token_ids))))
                if draft is not None:
                    chunk = replace(chunk, draft=draft)
                    rows -= len(draft.token_ids)
            extended.append(chunk)
        return extended

    def reserve(self, sequence: Sequence, count: int) -> int:
        """Allocates free blocks for tokens after the sequence's last one.

        Returns:
            How many of the ``count`` have room now.
        """
        missing = -(-(sequence.num_tokens + count - sequence.room) // BLOCK_SIZE)
        self._blocks.allocate(sequence, min(max(0, missing), self._blocks.num_free))
        return min(count, sequence.room - sequence.num_tokens)

    def schedule_ahead(self, chunks: list[Chunk], now: float = 0.0) -> list[Chunk]:
        """Schedules the step after one that is still being computed and that samples a token for each sequence.

        The tokens are not known yet, so only answers that reach their maximum length are known to end. Allocates the
        blocks that the step needs.

        Returns:
            One row for each sequence that continues. None of them if ``schedule`` might admit or preempt a sequence,
            which has to wait until ``chunks`` are marked as computed.
        """
        following = [
            Chunk(chunk.sequence, chunk.start + chunk.count, 1)
            for chunk in chunks
            if chunk.sequence.num_generated + 1 < chunk.sequence.params.max_tokens
        ]
        may_join = self._has_slot() and not self._held_back and self._seconds_until_admission(now) == 0.0
        if len(chunks) != sum(sequence.fetch is None for sequence in self.running) or may_join:
            return []
        missing = [max(0, -(-(chunk.start + 1 - chunk.sequence.room) // BLOCK_SIZE)) for chunk in following]
        if sum(missing) > self._blocks.num_free:
            return []
        for chunk, count in zip(following, missing, strict=True):
            self._blocks.allocate(chunk.sequence, count)
        return following

    def mark_computed(self, chunk: Chunk) -> None:
        """Marks the tokens of a chunk as computed, without its draft, and registers the blocks that are full now."""
        self._blocks.mark_computed(chunk.sequence, chunk.count)

    def mark_accepted(self, sequence: Sequence, count: int) -> None:
        """Marks so many more tokens as computed, which were computed as a draft."""
        self._blocks.mark_computed(sequence, count)

    def mark_fetched(self, sequence: Sequence, count: int, lossy_from: int | None) -> None:
        """Marks the first ``count`` of the fetched blocks as computed; the sequence takes part in steps again.

        Args:
            lossy_from: the first block of the sequence that was restored with a loss; None: none was.
        """
        sequence.fetch = None
        if lossy_from is not None and sequence.lossy_from is None:
            sequence.lossy_from = lossy_from
        tokens = count * BLOCK_SIZE
        self._blocks.mark_computed(sequence, tokens)
        self.prefix_cache_hits += tokens
        if not sequence.num_generated:
            sequence.num_cached += tokens
        self.mark_changed()

    def mark_changed(self) -> None:
        """Blocks were released, or a sequence arrived or left: a waiting sequence may fit now."""
        self._held_back = self._stalled = False

    def may_share(self, sequence: Sequence) -> bool:
        """Whether the sequence uses blocks of others and lets them use its own."""
        return self._blocks.may_share(sequence)

    def registered_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of a sequence's blocks that others can find."""
        return self._blocks.registered_keys(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Removes the sequence's blocks from the prefix cache: their contents are not valid."""
        self._blocks.forget(sequence)

    def _extend_running(self) -> bool:
        """Allocates the blocks for the next token of each running sequence; False if that took a preemption."""
        preemptions = self.num_preemptions
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            missing = self._blocks.num_missing(sequence)
            while missing > self._blocks.num_free and sequence in self.running:
                self._preempt(self.running[-1])
            if missing > 0 and sequence in self.running:
                self._blocks.allocate(sequence, missing)
            index += 1
        return preemptions == self.num_preemptions

    def _has_slot(self) -> bool:
        """Whether a waiting sequence could get a place in the batch, if need be by a preemption."""
        if not self.waiting or len(self.running) < self.max_batch:
            return bool(self.waiting)
        return self.running[-1].priority > self.waiting[0].priority

    def _seconds_until_admission(self, now: float) -> float | None:
        waited = now - min(sequence.queued_at for sequence in self.waiting)
        return self._batching.seconds_until_admission(len(self.running), len(self.waiting), waited, self.max_batch)

    def _admit(self, now: float) -> None:
        prefilling = [sequence for sequence in self.running if _num_missing(sequence) > 1]
        computing = {key: sequence for sequence in prefilling for key in self._blocks.pending_keys(sequence)}
        waits_for_leader = False
        for sequence in tuple(self.waiting):
            shared = self._blocks.match(sequence)
            if self._batching.admits_while_running and self._waits_for_leader(sequence, shared, computing):
                waits_for_leader = True
                continue
            if not self._make_room(sequence, shared):
                self._held_back = not waits_for_leader
                break
            self.waiting.remove(sequence)
            self._start(sequence, shared, now)
            insort(self.running, sequence, key=_order)
            computing.update(dict.fromkeys(self._blocks.pending_keys(sequence), sequence))

    def _waits_for_leader(self, sequence: Sequence, shared: list[int], computing: dict[bytes, Sequence]) -> bool:
        """Whether a sequence of the same or a better priority is computing the next block that this one lacks."""
        keys = self._blocks.matchable_keys(sequence)
        if len(shared) == len(keys):
            return False
        leader = computing.get(keys[len(shared)])
        return leader is not None and leader.priority <= sequence.priority

    def _make_room(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether the sequence fits; preempts running sequences of a worse priority if necessary."""
        worse = [other for other in self.running if other.priority > sequence.priority]
        if self._wanted(sequence, shared) > self._blocks.num_free + self._blocks.num_freed_with(worse):
            return False  # not even if all of them were preempted
        while len(self.running) == self.max_batch or self._wanted(sequence, shared) > self._blocks.num_free:
            if not worse:
                return False
            self._preempt(worse.pop())
        return True

    def _wanted(self, sequence: Sequence, shared: list[int]) -> int:
        """Free blocks that the sequence needs to join the batch."""
        return self._blocks.num_required(sequence, shared) + (1 if self.running else 0)

    def _start(self, sequence: Sequence, shared: list[int], now: float) -> None:
        self._blocks.start(sequence, shared)
        self.prefix_cache_queries += sequence.num_tokens
        self.prefix_cache_hits += sequence.num_computed
        if sequence.started_at is None:
            sequence.started_at = now
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        if self._fetching is not None and sequence.prefix is not None:
            until = min(sequence.prefix.blocks_to_load, len(self._blocks.matchable_keys(sequence)))
            sequence.prefix.blocks_to_load = 0  # fetched at most once
            if until > len(shared):
                sequence.fetch = self._fetching(sequence, until)

    def _distribute_budget(self) -> list[Chunk]:
        """Distributes the step's token budget; the docstring of the class has the rule."""
        decoding = [sequence for sequence in self.running if _num_missing(sequence) == 1 and sequence.fetch is None]
        prefilling = [sequence for sequence in self.running if _num_missing(sequence) > 1 and sequence.fetch is None]
        budget = self.step_tokens - len(decoding)
        counts = dict.fromkeys(prefilling, 0)
        if prefilling:
            first = prefilling[0]
            counts[first] = min(_num_missing(first), (budget + 1) // 2)
            budget -= counts[first]
        for sequence in sorted(prefilling, key=lambda sequence: (sequence.priority, _num_missing(sequence))):
            more = min(_num_missing(sequence) - counts[sequence], budget)
            counts[sequence] += more
            budget -= more
        chunks = [Chunk(sequence, sequence.num_computed, 1) for sequence in decoding]
        return chunks + [Chunk(s, s.num_computed, count) for s, count in counts.items() if count]

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=_order)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.mark_changed()
        self._blocks.release(sequence)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival


def _num_missing(sequence: Sequence) -> int:
    return sequence.num_tokens - sequence.num_computed
