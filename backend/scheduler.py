"""Decides which tokens of which sequences the next step computes."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from backend.batching import Batching
from backend.block_pool import BlockPool, chain_key, root_key
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


def blocks_at_most(num_tokens: int, window: int | None, step_tokens: int) -> int:
    """Blocks that a sequence that grows to so many tokens holds at any time, alone.

    Args:
        window: tokens that a token sees at most, itself included; None: all.
    """
    blocks = -(-num_tokens // BLOCK_SIZE)
    # Wherever in a block the window begins, and wherever in another the step ends.
    return blocks if window is None else min(blocks, (window + step_tokens + 2 * BLOCK_SIZE - 3) // BLOCK_SIZE)


class Scheduler:
    """One rule: a sequence has ``num_computed`` of ``num_tokens``, and a step computes at most ``step_tokens``.

    Decoding is the case of one missing token, prefill of many, a chunked prefill is what the budget leaves over, a
    prefix hit is a sequence that starts with something computed, and a preempted one has nothing computed.

    Order: smaller ``priority`` first, then order of arrival. When blocks run out the last in this order gives its own
    back and starts again later, so the first always gets to its end. Among priorities the order is strict: as long
    as there is enough work of a better priority, a worse one waits.

    Fairness of a step's budget: each sequence that lacks one token gets it, so a long prompt delays running answers
    by one step at most. Of what is left, at least half goes to the first prompt in order, which bounds how long any
    prompt takes; the rest goes to prompts by how little they lack, so that a short one does not wait for a long one.

    Memory: a sequence joins when there are blocks for all its tokens (those it shares do not count) and one more. The
    first that does not fit holds back those after it, or it might wait for ever. A sequence whose next block is being
    computed by another one waits for it, and shares it; so the answers to one prompt compute it once.

    Where every layer is windowed, a sequence holds only the blocks that some row still to come can see, and those of
    the tokens that the next step may compute: what leaves the window is given back, and what is far ahead not taken.

    Args:
        max_batch: sequences that run at the same time.
        step_tokens: tokens computed in one step at most; ``max_batch`` if that is more.
        shares_prefixes: whether sequences may use blocks that others have computed.
        window: tokens that a token sees at most, itself included; None: there is a layer in which it sees all.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_batch: int,
        step_tokens: int,
        batching: Batching = Batching(),  # noqa: B008 - frozen
        shares_prefixes: bool = True,
        window: int | None = None,
    ) -> None:
        self._pool = pool
        self.max_batch = max_batch
        self.step_tokens = max(step_tokens, max_batch)
        self._batching = batching
        self._shares_prefixes = shares_prefixes
        self._window = window
        self._arrivals = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # Somebody waits for room, and since that was seen nothing was given back and nobody came.
        self._held_back = False
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0
        self.prefix_asked_tokens = 0

    def add(self, sequence: Sequence, now: float = 0.0) -> None:
        """Queues a sequence. The caller has checked that it can fit the pool on its own, see ``blocks_at_most``.

        Args:
            now: ``time.monotonic()``, in seconds.
        """
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.queued_at = now
        insort(self.waiting, sequence, key=_order)
        self._held_back = False

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence, waiting or running, and frees its blocks."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def opens_in(self, now: float) -> float | None:
        """Seconds until a step has something to compute; None: not before something else happens."""
        if self.running:
            return 0.0
        return self._admission_in(now) if self.waiting else None

    def schedule(self, now: float = 0.0) -> list[Chunk]:
        """Chooses the next step's chunks and gives each sequence the blocks it needs for them.

        Empty only if there is nothing to do, or if a batch that has not begun waits for more.
        """
        if self._grow() and self._has_place() and self._admission_in(now) == 0.0:
            self._admit(now)
        return self._deal()

    def follow(self, chunks: list[Chunk], now: float = 0.0) -> list[Chunk]:
        """The step after one that is still being computed and gives each of its sequences a token.

        It is made without knowing the tokens, so it is as if no answer ended with them, except those whose length says
        so. Gives the sequences the blocks for it.

        Returns:
            One row for each sequence that goes on; none if ``schedule`` might let somebody in or would have to take
            blocks from somebody, which waits until ``chunks`` are noted as computed.
        """
        following = [
            Chunk(chunk.sequence, chunk.start + chunk.count, 1)
            for chunk in chunks
            if chunk.sequence.num_generated + 1 < chunk.sequence.params.max_tokens
        ]
        may_join = self._has_place() and not self._held_back and self._admission_in(now) == 0.0
        if len(chunks) != len(self.running) or may_join:
            return []
        missing = [max(0, -(-(chunk.start + 1 - chunk.sequence.room) // BLOCK_SIZE)) for chunk in following]
        if sum(missing) > self._pool.num_free:
            return []
        for chunk, count in zip(following, missing, strict=True):
            chunk.sequence.blocks += self._pool.allocate(count) or []
        return following

    def note_computed(self, chunk: Chunk) -> None:
        """Takes over what a step has computed, and lets others find the blocks that are full now."""
        sequence = chunk.sequence
        sequence.num_computed += chunk.count
        if self._may_share(sequence):
            self._register(sequence)
        self._leave_behind(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Lets nobody find the sequence's blocks any more: what they contain is not to be trusted."""
        keys = sequence.block_keys[: sequence.first_block]
        left_behind = self._pool.match(keys, sequence.tokens, BLOCK_SIZE, sequence.salt)
        self._pool.forget(left_behind + sequence.blocks)

    def _register(self, sequence: Sequence) -> None:
        while (sequence.num_registered + 1) * BLOCK_SIZE <= sequence.num_computed:
            index, at = sequence.num_registered, sequence.num_registered - sequence.first_block
            if at < 0 or (at == 0 and index > 0):
                return  # what it would follow on has been given back: only windows shorter than a block do that
            block = self._pool.register(
                sequence.blocks[at],
                self._keys(sequence, index + 1)[index],
                sequence.blocks[at - 1] if index else None,
                sequence.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE],
                sequence.salt,
            )
            if block is None:
                return
            sequence.blocks[at] = block
            sequence.num_registered += 1

    def _leave_behind(self, sequence: Sequence) -> None:
        """Gives back the blocks that no row still to come can see; whoever begins alike may find them for a while."""
        past = self._first_seen(sequence.num_computed) - sequence.first_block
        if past > 0:
            self._pool.release(sequence.blocks[:past])
            del sequence.blocks[:past]
            sequence.first_block += past

    def _first_seen(self, position: int) -> int:
        """First block that a row at this position or after it can see."""
        return 0 if self._window is None else max(0, position + 1 - self._window) // BLOCK_SIZE

    def _blocks_until(self, num_tokens: int, num_computed: int) -> int:
        """Blocks from the sequence's start that it has to have room for at this point."""
        if self._window is not None:
            # What it will hold once the window is full, so that it does not have to fight for it on the way.
            num_tokens = min(num_tokens, max(num_computed, self._window) + self.step_tokens)
        return -(-num_tokens // BLOCK_SIZE)

    def _lacking(self, sequence: Sequence) -> int:
        until = self._blocks_until(sequence.num_tokens, sequence.num_computed)
        return until - sequence.first_block - len(sequence.blocks)

    def _grow(self) -> bool:
        """Gives running sequences the blocks for their next token; False if that took a preemption."""
        preemptions = self.num_preemptions
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            missing = self._lacking(sequence)
            while missing > self._pool.num_free and sequence in self.running:
                self._preempt(self.running[-1])
            if missing > 0 and sequence in self.running:
                sequence.blocks += self._pool.allocate(missing) or []
            index += 1
        return preemptions == self.num_preemptions

    def _has_place(self) -> bool:
        """Whether somebody waits for whom there is a place in the batch, or could be made."""
        if not self.waiting or len(self.running) < self.max_batch:
            return bool(self.waiting)
        return self.running[-1].priority > self.waiting[0].priority

    def _admission_in(self, now: float) -> float | None:
        waited = now - min(sequence.queued_at for sequence in self.waiting)
        return self._batching.opens_in(len(self.running), len(self.waiting), waited, self.max_batch)

    def _admit(self, now: float) -> None:
        prefilling = [sequence for sequence in self.running if _missing(sequence) > 1]
        computing = {key: sequence for sequence in prefilling for key in self._keys_to_come(sequence)}
        follows = False
        for sequence in tuple(self.waiting):
            shared = self._match(sequence)
            if self._batching.joins_late and self._follows(sequence, shared, computing):
                follows = True
                continue
            if not self._make_room(sequence, shared):
                self._held_back = not follows
                break
            self.waiting.remove(sequence)
            self._start(sequence, shared, now)
            insort(self.running, sequence, key=_order)
            computing.update(dict.fromkeys(self._keys_to_come(sequence), sequence))

    def _match(self, sequence: Sequence) -> list[int]:
        """Computed blocks that the sequence can begin with; at least its last token is left to compute."""
        if not self._may_share(sequence):
            return []
        keys = self._keys(sequence, (sequence.num_tokens - 1) // BLOCK_SIZE)
        return self._pool.match(keys, sequence.tokens, BLOCK_SIZE, sequence.salt)

    def _follows(self, sequence: Sequence, shared: list[int], computing: dict[bytes, Sequence]) -> bool:
        """Whether a sequence that is not less urgent is about to compute the next block that this one lacks."""
        shareable = (sequence.num_tokens - 1) // BLOCK_SIZE
        if not self._may_share(sequence) or len(shared) >= shareable:
            return False
        leader = computing.get(self._keys(sequence, shareable)[len(shared)])
        return leader is not None and leader.priority <= sequence.priority

    def _make_room(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether the sequence can join; running ones of a worse priority make room for it."""
        worse = [other for other in self.running if other.priority > sequence.priority]
        theirs = sum(self._pool.references(block) == 1 for other in worse for block in other.blocks)
        if self._wanted(sequence, shared) > self._pool.num_free + theirs:
            return False  # not even if all of them went
        while len(self.running) == self.max_batch or self._wanted(sequence, shared) > self._pool.num_free:
            if not worse:
                return False
            self._preempt(worse.pop())
        return True

    def _wanted(self, sequence: Sequence, shared: list[int]) -> int:
        """Free blocks that must be there for the sequence to join."""
        computed = len(shared) * BLOCK_SIZE
        revived = sum(not self._pool.references(block) for block in shared[self._first_seen(computed) :])
        own = self._blocks_until(sequence.num_tokens, computed) - len(shared)
        return own + revived + (1 if self.running else 0)

    def _start(self, sequence: Sequence, shared: list[int], now: float) -> None:
        for block in shared:
            self._pool.share(block)
        sequence.blocks = list(shared)
        sequence.num_registered = len(shared)
        sequence.num_computed = len(shared) * BLOCK_SIZE
        self._leave_behind(sequence)
        own = self._pool.allocate(self._lacking(sequence))
        if own is None:
            raise RuntimeError("an admitted sequence found no blocks")
        sequence.blocks += own
        self.prefix_asked_tokens += sequence.num_tokens
        self.prefix_hit_tokens += sequence.num_computed
        if sequence.started_at is None:
            sequence.started_at = now
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)

    def _deal(self) -> list[Chunk]:
        """Divides the budget; see the class for the rule."""
        decoding = [sequence for sequence in self.running if _missing(sequence) == 1]
        prefilling = [sequence for sequence in self.running if _missing(sequence) > 1]
        budget = self.step_tokens - len(decoding)
        counts = dict.fromkeys(prefilling, 0)
        if prefilling:
            first = prefilling[0]
            counts[first] = min(_missing(first), (budget + 1) // 2)
            budget -= counts[first]
        for sequence in sorted(prefilling, key=lambda sequence: (sequence.priority, _missing(sequence))):
            more = min(_missing(sequence) - counts[sequence], budget)
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
        self._held_back = False
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.first_block = 0
        sequence.num_computed = 0
        sequence.num_registered = 0

    def _may_share(self, sequence: Sequence) -> bool:
        return self._shares_prefixes and sequence.can_share

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """Keys of the sequence's first ``count`` full blocks, made once."""
        keys = sequence.block_keys
        while len(keys) < count:
            tokens = sequence.tokens[len(keys) * BLOCK_SIZE : (len(keys) + 1) * BLOCK_SIZE]
            keys.append(chain_key(keys[-1] if keys else root_key(sequence.salt), tokens))
        return keys[:count]

    def _keys_to_come(self, sequence: Sequence) -> list[bytes]:
        """Keys of the blocks that a running sequence has still to fill with tokens it has already."""
        if not self._may_share(sequence):
            return []
        return self._keys(sequence, sequence.num_tokens // BLOCK_SIZE)[sequence.num_registered :]


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival


def _missing(sequence: Sequence) -> int:
    return sequence.num_tokens - sequence.num_computed
