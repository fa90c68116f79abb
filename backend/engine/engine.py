"""The engine: one step after the other over all sequences. Used by one thread."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from backend.engine.block_manager import blocks_at_most
from backend.engine.block_pool import BlockPool
from backend.engine.config import Batching
from backend.engine.kv_connector import Fetch, Keep, KvConnector
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, StepInput, StepOutput
from backend.engine.offload import KvOffloader
from backend.engine.output_processor import SequenceState, process_token
from backend.engine.sampler import SampledToken, sample_independently
from backend.engine.scheduler import Chunk, Scheduler
from backend.engine.sequence import FinishReason, Sequence, TokenLogprobs
from backend.engine.stats import EngineStats, StepTimings, Totals
from backend.engine.step import (
    ChunkRows,
    InFlightStep,
    PendingTokens,
    StepResult,
    build_next_step,
    build_step,
    can_sample_ahead,
    collect_result,
)
from backend.errors import is_out_of_memory

logger = logging.getLogger(__name__)

_TOTALS = tuple(field.name for field in fields(Totals))
_OFFLOAD_BATCH = 8
"""Blocks of a growing answer are handed over so many at a time."""


@dataclass(slots=True)
class Output:
    """What one step added to one sequence, ready to send."""

    sequence_id: int
    text: str
    logprobs: list[TokenLogprobs]
    """Of the tokens that begin in ``text``; empty unless the sequence asked for them."""
    prompt_logprobs: list[TokenLogprobs]
    """With the first output only."""
    num_generated: int
    """Tokens generated so far."""
    finish_reason: FinishReason | None
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were there already when the sequence first ran."""
    embedding: npt.NDArray[np.float32] | None = None
    """float32 [hidden_size]: mean of the prompt's hidden states, of a pooled sequence."""
    logits: npt.NDArray[np.float32] | None = None
    """float32 [vocab_size]: those of the last token, of a sequence that probes."""
    error: str | None = None
    """A sentence for the client, where the reason is ``EXPIRED``, ``SHED`` or ``FAILED`` and more is known."""


class Engine:
    """Continuous batching: sequences join and leave between any two steps.

    Args:
        runner: what computes; its ``num_blocks`` bound the memory.
        max_batch: sequences that run at the same time; None: as many as suit the runner.
        step_tokens: tokens computed in one step at most; None likewise.
        batching: when waiting sequences may join.
        shares_prefixes: whether sequences use blocks that others have computed.
        prefix_io: keeps blocks beyond this engine's memory and fetches them again; the runner must have ``kv_blocks``,
            and a layer that sees all tokens. None: nobody does.
        lossy_key: the key that takes the place of a block's own from where something was restored with a loss; None:
            nothing ever is.
    """

    def __init__(
        self,
        runner: ModelRunner,
        max_batch: int | None,
        step_tokens: int | None,
        batching: Batching = Batching(),  # noqa: B008 - frozen
        shares_prefixes: bool = True,
        kv_connector: KvConnector | None = None,
        lossy_key: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.runner = runner
        self.pool = BlockPool(runner.num_blocks)
        attention_window = runner.config.attention_window
        max_batch, step_tokens = max_batch or runner.max_batch, step_tokens or runner.step_tokens
        fetching = None if kv_connector is None else self._begin_fetch
        self.scheduler = Scheduler(
            self.pool, max_batch, step_tokens, batching, shares_prefixes, attention_window, fetching, lossy_key
        )
        self.timings = StepTimings()
        """Of the last step."""
        self._sequences: dict[int, Sequence] = {}
        self._states: dict[int, SequenceState] = {}
        self._eos = frozenset(runner.config.eos_token_ids)
        self._totals = Totals()
        self._in_flight: InFlightStep | None = None
        """The step that was launched ahead of the last one that was taken over."""
        self._kv_connector = kv_connector
        self._lossy_key = lossy_key
        kv_blocks = runner.kv_blocks if kv_connector is not None else None
        self._offloader: KvOffloader | None = None
        if kv_connector is not None and kv_blocks is not None:
            self._offloader = KvOffloader(self.pool, kv_blocks, kv_connector)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            ValueError: prompt and answer cannot fit the KV memory even alone, or the model does not know a token.
        """
        if max(sequence.tokens, default=0) >= (rows := self.runner.config.vocab_size):
            raise ValueError(f"a sequence has a token that is not in the embedding, which has {rows} rows")
        longest = sequence.num_prompt + sequence.params.max_tokens
        most = blocks_at_most(longest, self.runner.config.attention_window, self.scheduler.step_tokens)
        if sequence.num_prompt < 1 or most > self.pool.num_blocks:
            raise ValueError(f"a sequence of up to {longest} tokens does not fit {self.pool.num_blocks} KV blocks")
        self._sequences[sequence.id] = sequence
        self._states[sequence.id] = SequenceState()
        self.scheduler.add(sequence, time.monotonic())

    def abort(self, sequence_id: int) -> None:
        """Drops a sequence and frees its blocks; nothing happens if it has ended already."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ABORTED)

    def fail_all(self) -> list[Output]:
        """Ends every sequence with ``FAILED`` and frees all blocks."""
        return [self._fail(sequence, FinishReason.FAILED, None) for sequence in list(self._sequences.values())]

    @property
    def has_work(self) -> bool:
        """Whether there are sequences that have not ended."""
        return bool(self._sequences)

    @property
    def may_lose(self) -> bool:
        """Whether blocks may come back with a loss."""
        return self._lossy_key is not None

    def pause(self) -> float | None:
        """Seconds until a step would do anything: 0 mostly; None: nothing to do before something else happens."""
        if not self._sequences:
            return None
        now = time.monotonic()
        pauses = [s.deadline - now for s in self._sequences.values() if s.deadline is not None]
        seconds_until_admission = self.scheduler.seconds_until_admission(now)
        if seconds_until_admission is not None:
            pauses.append(seconds_until_admission)
        return max(0.0, min(pauses)) if pauses else None

    def stats(self) -> EngineStats:
        """Counts for metrics."""
        held = self.pool.num_held * BLOCK_SIZE
        unused = sum(max(0, s.room - s.num_tokens) for s in self.scheduler.running)
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            max_batch=self.scheduler.max_batch,
            step_tokens=self.scheduler.step_tokens,
            deterministic=self.runner.deterministic,
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            held_blocks=self.pool.num_held,
            fragmentation=unused / held if held else 0.0,
            prefix_asked_tokens=self.scheduler.prefix_asked_tokens,
            prefix_hit_tokens=self.scheduler.prefix_hit_tokens,
            preemptions=self.scheduler.num_preemptions,
            **{name: getattr(self._totals, name) for name in _TOTALS},
        )

    def problems(self) -> list[str]:
        """What is wrong with the books of blocks and sequences, in sentences; empty if all is well. Repairs nothing."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        holders = Counter(block for sequence in running for block in sequence.blocks)
        if self._offloader is not None:
            holders += self._offloader.holders
        found = self.pool.problems(holders)
        scheduled = [sequence.id for sequence in (*running, *waiting)]
        if sorted(scheduled) != sorted(self._sequences) or set(self._states) != set(self._sequences):
            found.append("the scheduler and the engine do not know the same sequences")
        found += [f"sequence {s.id} waits and holds blocks" for s in waiting if s.blocks or s.num_computed]
        found += [
            f"sequence {s.id} has {len(s.blocks)} blocks for {s.num_tokens} tokens, {s.num_computed} of them computed"
            for s in running
            if len(set(s.blocks)) != len(s.blocks)
            or s.num_computed > min(s.room, s.num_tokens)
            or s.num_registered * BLOCK_SIZE > s.num_computed
        ]
        return found

    def fetched(self, fetch: Fetch, count: int, lossy_from: int | None) -> None:
        """Takes over what was fetched: the first ``count`` blocks are filled. Nothing if the sequence has moved on.

        Args:
            lossy_from: see ``Scheduler.mark_fetched``.
        """
        sequence = self._sequences.get(fetch.sequence_id)
        if sequence is not None and sequence.fetch is fetch:
            if fetch.cancel.is_set:  # it has been forgotten on its way
                count, lossy_from = 0, None
            fetch.incoming.arrived(count)
            self.scheduler.mark_fetched(sequence, count, lossy_from)
        fetch.incoming.close()

    def forget_blocks(self, keys: Many[bytes]) -> None:
        """Lets nobody find the blocks of a chain, in whatever form they are here or under way, nor keeps them longer.

        Args:
            keys: exact ones, from the first block on.
        """
        self.pool.forget_keys(keys)
        if self._lossy_key is not None:
            self.pool.forget_keys([self._lossy_key(key) for key in keys])
        self._give_up(keys[0])

    def forget_prefixes(self) -> None:
        """Lets nobody find any block that is here or on its way, nor keeps one any longer; who uses one goes on."""
        self.pool.forget(list(range(self.pool.num_blocks)))
        self._give_up(None)

    def _give_up(self, first_key: bytes | None) -> None:
        """Neither takes nor keeps anything more of chains that begin with this block; None: of any there are now."""
        for sequence in self._sequences.values():
            if first_key is None or sequence.block_keys[:1] == [first_key]:
                sequence.prefix = None
                if sequence.fetch is not None:
                    sequence.fetch.cancel.set()
        if self._offloader is not None:
            self._offloader.cancel(first_key)

    def kept(self, keep: Keep) -> None:
        """Takes blocks back that are not read any more."""
        if self._offloader is not None:
            self._offloader.kept(keep)
            self.scheduler.mark_changed()

    def step(self) -> list[Output]:
        """Takes over one step and returns what it added, for each sequence that got a token or ended.

        Where a device computes by itself, the step after it is launched before, on tokens that only the device knows:
        so there is always something to compute while the host makes text of tokens. A sequence that turns out to have
        ended has one row too many in that step, which nobody looks at.

            device   │ step 1 │ step 2 │ step 3 │
            host     │ launches 2      │
                              │ text of 1, launches 3, …
        """
        self.timings = StepTimings()
        now = time.monotonic()
        expired = self._expire(now)
        flight = self._in_flight if self._in_flight is not None and self._in_flight.live else self._launch(now)
        self._in_flight = None
        if flight is None:
            return expired
        if flight.tokens is not None:
            self._in_flight = self._launch_after(flight, flight.tokens, now)
        self._count_step(flight)
        try:
            result = collect_result(flight, self._states)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return expired + self._shed(flight)
        return expired + self._postprocess(flight, result)

    def _launch(self, now: float) -> InFlightStep | None:
        """Launches the step that is due; None: there is nothing to compute."""
        chunks = self.scheduler.schedule(now)
        if not chunks:
            return None
        return self._run(chunks, *build_step(chunks, self._states), can_sample_ahead(chunks))

    def _launch_after(self, flight: InFlightStep, tokens: PendingTokens, now: float) -> InFlightStep | None:
        """Launches the step after one whose tokens are not here yet; None: that one has to be taken over first."""
        live = flight.live
        chunks = self.scheduler.schedule_ahead([flight.chunks[index] for index in live], now)
        if not chunks:
            return None
        going_on = {chunk.sequence.id for chunk in chunks}
        rows = [index for index in live if flight.chunks[index].sequence.id in going_on]
        return self._run(chunks, *build_next_step(chunks, tokens.of(rows)), True)

    def _run(self, chunks: list[Chunk], step: StepInput, rows: list[ChunkRows], only_tokens: bool) -> InFlightStep:
        try:
            output = self.runner.run(step)
            tokens = None
            if output.unfinished and only_tokens:
                chosen = sample_independently(output.logits, [chunk.sequence for chunk in chunks])
                tokens = PendingTokens(output.logits, chosen)
            return InFlightStep(chunks, rows, output, tokens)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return InFlightStep(chunks, rows, error)

    def _expire(self, now: float) -> list[Output]:
        """Ends what nobody waits for any more."""
        late = [s for s in self._sequences.values() if s.deadline is not None and s.deadline <= now]
        self._totals.expired += len(late)
        return [
            self._fail(
                s,
                FinishReason.EXPIRED,
                "the request's deadline passed "
                + ("while it waited" if s.started_at is None else f"after {s.num_generated} generated tokens"),
            )
            for s in late
        ]

    def _shed(self, flight: InFlightStep) -> list[Output]:
        """Ends the younger half of a step that did not fit the memory (one at least); the others try again."""
        order = sorted((flight.chunks[index].sequence for index in flight.live), key=lambda s: (s.priority, s.arrival))
        shed = order[len(order) // 2 :]
        self._totals.shed += len(shed)
        for sequence in order[: len(order) // 2]:
            sequence.rewind_random()
        logger.error("a step of %d sequences ran out of memory; %d of them are ended", len(order), len(shed))
        return [
            self._fail(s, FinishReason.SHED, "the engine ran out of memory; try again when it has less to do")
            for s in shed
        ]

    def _count_step(self, flight: InFlightStep) -> None:
        totals = self._totals
        totals.steps += 1
        totals.batch_slots_used += len(flight.chunks)
        totals.computed_rows += sum(chunk.count for chunk in flight.chunks)
        if isinstance(flight.output, StepOutput):
            totals.padding_rows += flight.output.padding_rows
        for chunk in (flight.chunks[index] for index in flight.live):
            sequence, notes = chunk.sequence, self._states[chunk.sequence.id]
            end = chunk.start + chunk.count
            totals.useful_rows += max(0, end - max(notes.max_computed, chunk.start))
            notes.max_computed = max(notes.max_computed, end)
            totals.prompt_tokens += max(0, min(sequence.num_prompt, end) - chunk.start)
            if not notes.has_started and sequence.started_at is not None:
                notes.has_started = True
                self.timings.queued.append(sequence.started_at - sequence.queued_at)

    def _postprocess(self, flight: InFlightStep, result: StepResult) -> list[Output]:
        now = time.monotonic()
        outputs: list[Output] = []
        for chunk in [flight.chunks[index] for index in flight.live]:
            sequence = chunk.sequence
            if sequence.id in result.poisoned:
                outputs.append(self._fail_poisoned(sequence))
                continue
            self.scheduler.mark_computed(chunk)
            if chunk.reaches_end:
                # Its numbers have been looked at, and so whatever they depend on.
                self._offer(sequence, 1 if not sequence.num_generated else _OFFLOAD_BATCH)
            if sequence.id in result.sampled:
                outputs.append(self._advance(sequence, result.sampled[sequence.id], now))
            elif chunk.reaches_end:
                reason = FinishReason.STOP if sequence.pooled else FinishReason.LENGTH
                outputs.append(self._output(sequence, "", [], True, reason))
        return outputs

    def _fail_poisoned(self, sequence: Sequence) -> Output:
        """Ends a sequence whose numbers went wrong; nobody may begin with the blocks that led there."""
        self._totals.poisoned += 1
        logger.error(
            "the model produced values that are not numbers; one sequence is ended, %d go on", len(self._sequences) - 1
        )
        self.scheduler.forget(sequence)
        return self._fail(
            sequence, FinishReason.FAILED, "the model produced values that are not numbers for this request"
        )

    def _fail(self, sequence: Sequence, reason: FinishReason, error: str | None) -> Output:
        self._end(sequence, reason)
        return Output(sequence.id, "", [], [], sequence.num_generated, reason, sequence.num_cached, error=error)

    def _advance(self, sequence: Sequence, sampled: SampledToken, now: float) -> Output:
        """Appends a token, turns it into text, and ends the sequence if it is time."""
        first = sequence.num_generated == 0
        sequence.append(sampled.token_id)
        self._totals.generated_tokens += 1
        notes = self._states[sequence.id]
        if not first:
            self.timings.between_tokens.append(now - notes.last_token_at)
        notes.record_token(now)
        ends = sampled.token_id in self._eos and not sequence.params.ignore_eos
        said = process_token(sequence, sampled, notes.logprobs, ends)
        return self._output(sequence, said.text, said.logprobs, first, said.reason)

    def _output(
        self,
        sequence: Sequence,
        text: str,
        logprobs: list[TokenLogprobs],
        first: bool,
        reason: FinishReason | None,
    ) -> Output:
        prompt_logprobs = sequence.prompt_logprobs if first else []
        output = Output(
            sequence.id, text, logprobs, prompt_logprobs, sequence.num_generated, reason, sequence.num_cached
        )
        if sequence.pooled:
            output.embedding = self._states[sequence.id].mean()
        if sequence.probes:
            output.logits = self._states[sequence.id].logits
        if reason is not None:
            self._end(sequence, reason)
        return output

    def _begin_fetch(self, sequence: Sequence, until: int) -> Fetch | None:
        """Has the blocks of a sequence filled, from the first that is not computed up to that with this number."""
        kv_blocks, prefix, first = self.runner.kv_blocks, sequence.prefix, sequence.num_registered
        if kv_blocks is None or prefix is None or self._kv_connector is None:
            return None
        blocks = sequence.blocks[first : min(until, first + kv_blocks.most_at_once)]
        incoming = kv_blocks.incoming(blocks)
        if incoming is None:
            return None
        fetch = Fetch(sequence.id, prefix, first, blocks, incoming)
        self._kv_connector.fetch(fetch)
        return fetch

    def _offer(self, sequence: Sequence, least: int) -> None:
        """Hands over a sequence's full blocks, as soon as there are so many new ones."""
        prefix = sequence.prefix
        if self._offloader is None or prefix is None or not self._offloader.has_room:
            return
        if sequence.num_registered - prefix.kept >= least:
            self._offloader.offer(sequence, self.scheduler.registered_keys(sequence))

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        is_sound = sequence.num_generated and reason not in (FinishReason.FAILED, FinishReason.SHED)
        if self._offloader is not None and is_sound:
            self._offloader.sequence_ended(sequence, self.scheduler.registered_keys(sequence))
        self.scheduler.remove(sequence)
        del self._sequences[sequence.id]
        rate = self._states.pop(sequence.id).rate(sequence.num_generated)
        if rate is not None and reason is not FinishReason.ABORTED:
            self.timings.answer_rates.append(rate)
