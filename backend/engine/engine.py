"""The engine: continuous batching, one step after the other over all sequences. Used by one thread."""

from __future__ import annotations

import logging
import time
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import fields, replace

from backend.engine.block_manager import blocks_at_most
from backend.engine.block_pool import BlockPool
from backend.engine.config import Batching
from backend.engine.kv_connector import KvConnector, LoadRequest, SaveRequest
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, StepInput, StepOutput
from backend.engine.offload import KvOffloader
from backend.engine.output_processor import Output, SequenceState, process_token
from backend.engine.sampler import SampledToken, sample_independently
from backend.engine.scheduler import Chunk, Scheduler
from backend.engine.sequence import PREDICTION, Draft, FinishReason, Sequence, TokenLogprobs
from backend.engine.stats import DraftCounts, EngineStats, StepTimings, Totals
from backend.engine.step import (
    ChunkRows,
    InFlightStep,
    PendingTokens,
    Speculator,
    StepResult,
    build_next_step,
    build_step,
    can_sample_ahead,
    collect_result,
)
from backend.errors import is_out_of_memory

logger = logging.getLogger(__name__)

_TOTALS = tuple(field.name for field in fields(Totals) if field.name != "drafts")
_OFFLOAD_BATCH = 8
"""Blocks of a growing answer are offloaded so many at a time."""


class Engine:
    """Continuous batching: sequences join and leave between any two steps.

    Args:
        runner: what computes; its ``num_blocks`` bound the memory.
        max_batch: sequences that run at the same time; None: as many as suit the runner.
        step_tokens: tokens computed in one step at most; None likewise.
        batching: when waiting sequences may join.
        shares_prefixes: whether sequences use blocks that others have computed.
        prefix_io: keeps blocks beyond this engine's memory and fetches them again; the runner must have ``kv_blocks``,
            and a layer that sees all tokens. None: no layer does.
        lossy_key: the key that takes the place of a block's own from where something was restored with a loss; None:
            nothing ever is.
        speculator: proposes tokens that a step verifies; None: each step adds one token to a sequence.
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
        speculator: Speculator | None = None,
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
        """The step that was launched before the result of the last one was processed."""
        self._kv_connector = kv_connector
        self._lossy_key = lossy_key
        self._speculator = speculator
        kv_blocks = runner.kv_blocks if kv_connector is not None else None
        self._offloader: KvOffloader | None = None
        if kv_connector is not None and kv_blocks is not None:
            self._offloader = KvOffloader(self.pool, kv_blocks, kv_connector)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            ValueError: prompt and answer cannot fit the KV memory even alone, or the model does not know a token.
        """
        if max((*sequence.tokens, *sequence.prediction), default=0) >= (rows := self.runner.config.vocab_size):
            raise ValueError(f"a sequence has a token that is not in the embedding, which has {rows} rows")
        longest = sequence.num_prompt + sequence.params.max_tokens
        most = blocks_at_most(longest, self.runner.config.attention_window, self.scheduler.step_tokens)
        if sequence.num_prompt < 1 or most > self.pool.num_blocks:
            raise ValueError(f"a sequence of up to {longest} tokens does not fit {self.pool.num_blocks} KV blocks")
        sequence.end_tokens = sorted(self._eos | sequence.params.stop_token_ids)
        self._sequences[sequence.id] = sequence
        self._states[sequence.id] = SequenceState()
        self.scheduler.add(sequence, time.monotonic())

    def abort(self, sequence_id: int) -> None:
        """Ends a sequence and releases its blocks; no effect if it has ended already."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ABORTED)

    def fail_all(self) -> list[Output]:
        """Ends every sequence with ``FAILED`` and releases all blocks."""
        return [self._fail(sequence, FinishReason.FAILED, None) for sequence in list(self._sequences.values())]

    @property
    def has_work(self) -> bool:
        """Whether there are sequences that have not ended."""
        return bool(self._sequences)

    @property
    def may_restore_lossy(self) -> bool:
        """Whether blocks may be restored with a loss."""
        return self._lossy_key is not None

    def seconds_until_work(self) -> float | None:
        """Seconds until a step has anything to do; None: not before a request, a fetch or a copy changes that."""
        if not self._sequences:
            return None
        now = time.monotonic()
        waits = [s.deadline - now for s in self._sequences.values() if s.deadline is not None]
        seconds = self.scheduler.seconds_until_work(now)
        if seconds is not None:
            waits.append(seconds)
        return max(0.0, min(waits)) if waits else None

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
            prefix_cache_queries=self.scheduler.prefix_cache_queries,
            prefix_cache_hits=self.scheduler.prefix_cache_hits,
            preemptions=self.scheduler.num_preemptions,
            drafts={method: replace(counts) for method, counts in self._totals.drafts.items()},
            **{name: getattr(self._totals, name) for name in _TOTALS},
        )

    def problems(self) -> list[str]:
        """Violated invariants of blocks and sequences, in sentences; empty if there are none. Repairs nothing."""
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

    def fetched(self, fetch: LoadRequest, count: int, lossy_from: int | None) -> None:
        """Ends a fetch that filled the first ``count`` blocks. No effect on a sequence that no longer waits for it.

        Args:
            lossy_from: see ``Scheduler.mark_fetched``.
        """
        sequence = self._sequences.get(fetch.sequence_id)
        if sequence is not None and sequence.fetch is fetch:
            if fetch.cancel.is_set:  # forgotten while it was being fetched
                count, lossy_from = 0, None
            fetch.incoming.arrived(count)
            self.scheduler.mark_fetched(sequence, count, lossy_from)
        fetch.incoming.close()

    def forget_blocks(self, keys: abc.Sequence[bytes]) -> None:
        """Removes the blocks of a chain from the prefix cache, exact and lossy ones, and cancels their copies.

        Args:
            keys: exact keys, from the first block on.
        """
        self.pool.forget_keys(keys)
        if self._lossy_key is not None:
            self.pool.forget_keys([self._lossy_key(key) for key in keys])
        self._cancel_transfers(keys[0])

    def forget_prefixes(self) -> None:
        """Empties the prefix cache and cancels all copies; running sequences keep the blocks they use."""
        self.pool.forget(list(range(self.pool.num_blocks)))
        self._cancel_transfers(None)

    def _cancel_transfers(self, first_key: bytes | None) -> None:
        """Cancels fetches and copies of chains that begin with this block; None: of all chains."""
        for sequence in self._sequences.values():
            if first_key is None or sequence.block_keys[:1] == [first_key]:
                sequence.prefix = None
                if sequence.fetch is not None:
                    sequence.fetch.cancel.set()
        if self._offloader is not None:
            self._offloader.cancel(first_key)

    def kept(self, keep: SaveRequest) -> None:
        """Releases blocks that have been copied."""
        if self._offloader is not None:
            self._offloader.kept(keep)
            self.scheduler.mark_changed()

    def step(self) -> list[Output]:
        """Processes the result of one step; returns an output for each sequence that got a token or ended.

        If the runner computes asynchronously, the next step is launched first, on tokens that only the device knows.
        So the device computes while the host turns tokens into text. If a sequence turns out to have ended, its row in
        the step that was launched ahead is ignored.

            device   │ step 1 │ step 2 │ step 3 │
            host     │ launches 2      │
                              │ text of 1, launches 3, …
        """
        self.timings = StepTimings()
        now = time.monotonic()
        began = time.perf_counter()
        expired = self._expire(now)
        launched = self._in_flight if self._in_flight is not None and self._in_flight.live else self._launch(now)
        self._in_flight = None
        if launched is None:
            return expired
        if launched.tokens is not None and not self._wants_step(launched):
            self._in_flight = self._launch_after(launched, launched.tokens, now)
        self._count_step(launched)
        try:
            result = collect_result(launched, self._states)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return expired + self._abort_half(launched)
        generated = self._totals.generated_tokens
        outputs = self._postprocess(launched, result)
        if self._speculator is not None:
            tokens = self._totals.generated_tokens - generated
            self._record_drafts(self._speculator, launched.chunks, tokens, time.perf_counter() - began)
        return expired + outputs

    def _record_drafts(self, speculator: Speculator, chunks: list[Chunk], tokens: int, seconds: float) -> None:
        plain = speculator.record(chunks, tokens, seconds)
        for method in {chunk.draft.method for chunk in chunks if chunk.draft is not None}:
            # A draft whose sequence failed was not counted.
            if (counts := self._totals.drafts.get(method)) is not None:
                counts.seconds += seconds
                counts.plain_seconds += plain

    def _launch(self, now: float) -> InFlightStep | None:
        """Launches the step that is due; None: there is nothing to compute."""
        chunks = self.scheduler.schedule(now)
        if not chunks:
            return None
        if self._speculator is not None and (room := self.scheduler.step_tokens - sum(c.count for c in chunks)) > 0:
            may_have = [chunk for chunk in chunks if self._states[chunk.sequence.id].may_have_drafts]
            drafts = self._speculator.propose(may_have, room, self.scheduler.reserve)
            chunks = self.scheduler.with_drafts(chunks, drafts)
        wants_states = self._speculator is not None and self._speculator.wants_states
        return self._run(chunks, *build_step(chunks, self._states, wants_states), can_sample_ahead(chunks))

    def _wants_step(self, launched: InFlightStep) -> bool:
        return self._speculator is not None and self._speculator.wants_step(launched.chunks)

    def _launch_after(self, launched: InFlightStep, tokens: PendingTokens, now: float) -> InFlightStep | None:
        """Launches the step after one whose tokens are still on the device; None: its result is needed first."""
        live = launched.live
        chunks = self.scheduler.schedule_ahead([launched.chunks[index] for index in live], now)
        if not chunks:
            return None
        continuing = {chunk.sequence.id for chunk in chunks}
        rows = [index for index in live if launched.chunks[index].sequence.id in continuing]
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
        """Ends sequences whose deadline has passed."""
        late = [s for s in self._sequences.values() if s.deadline is not None and s.deadline <= now]
        self._totals.deadline_exceeded += len(late)
        return [
            self._fail(
                s,
                FinishReason.EXPIRED,
                "the request's deadline passed "
                + ("while it waited" if s.started_at is None else f"after {s.num_generated} generated tokens"),
            )
            for s in late
        ]

    def _abort_half(self, launched: InFlightStep) -> list[Output]:
        """Ends the younger half of a step that ran out of memory (at least one sequence); the others are retried."""
        order = sorted(
            (launched.chunks[index].sequence for index in launched.live), key=lambda s: (s.priority, s.arrival)
        )
        shed = order[len(order) // 2 :]
        self._totals.out_of_memory += len(shed)
        for sequence in order[: len(order) // 2]:
            sequence.rewind_rng()
        logger.error("a step of %d sequences ran out of memory; %d of them are ended", len(order), len(shed))
        return [
            self._fail(s, FinishReason.SHED, "the engine ran out of memory; try again when it has less to do")
            for s in shed
        ]

    def _count_step(self, launched: InFlightStep) -> None:
        totals = self._totals
        totals.steps += 1
        totals.batch_slots_used += len(launched.chunks)
        totals.computed_rows += sum(chunk.num_rows for chunk in launched.chunks)
        if isinstance(launched.output, StepOutput):
            totals.padding_rows += launched.output.padding_rows
        for chunk in (launched.chunks[index] for index in launched.live):
            sequence, notes = chunk.sequence, self._states[chunk.sequence.id]
            end = chunk.start + chunk.count
            totals.first_time_rows += max(0, end - max(notes.max_computed, chunk.start)) + chunk.num_rows - chunk.count
            notes.max_computed = max(notes.max_computed, end)
            totals.prompt_tokens += max(0, min(sequence.num_prompt, end) - chunk.start)
            if not notes.has_started and sequence.started_at is not None:
                notes.has_started = True
                self.timings.queued.append(sequence.started_at - sequence.queued_at)

    def _postprocess(self, launched: InFlightStep, result: StepResult) -> list[Output]:
        now = time.monotonic()
        outputs: list[Output] = []
        for index in launched.live:
            chunk = launched.chunks[index]
            sequence = chunk.sequence
            if sequence.id in result.non_finite:
                if chunk.draft is not None:
                    # Not a number may be what the draft brought in: attention that is masked out counts 0 times it.
                    self._states[sequence.id].may_have_drafts = False
                    continue
                outputs.append(self._fail_non_finite(sequence))
                continue
            self.scheduler.mark_computed(chunk)
            if chunk.reaches_end:
                # Its logits are finite, and so is whatever they depend on.
                self._offer(sequence, 1 if not sequence.num_generated else _OFFLOAD_BATCH)
            if sequence.id in result.sampled:
                outputs.append(self._advance(chunk, result.sampled[sequence.id], now))
                self._note_state(launched, index)
            elif chunk.reaches_end:
                reason = FinishReason.STOP if sequence.pooled else FinishReason.LENGTH
                outputs.append(self._output(sequence, "", [], True, reason))
        return outputs

    def _fail_non_finite(self, sequence: Sequence) -> Output:
        """Ends a sequence with logits that are not numbers, and removes its blocks from the prefix cache."""
        self._totals.non_finite += 1
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

    def _advance(self, chunk: Chunk, tokens: abc.Iterable[SampledToken], now: float) -> Output:
        """Appends the sampled tokens, turns them into text, and ends the sequence if it is time."""
        sequence = chunk.sequence
        params, notes = sequence.params, self._states[sequence.id]
        before = sequence.num_generated
        texts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        reason: FinishReason | None = None
        for sampled in tokens:
            sequence.append(sampled.token_id)
            ends = sampled.token_id in params.stop_token_ids or (
                sampled.token_id in self._eos and not params.ignore_eos
            )
            said = process_token(sequence, sampled, notes.logprobs, ends)
            texts.append(said.text)
            logprobs += said.logprobs
            reason = said.reason
            if reason is not None:
                break
        added = sequence.num_generated - before
        self._totals.generated_tokens += added
        if chunk.draft is not None:
            self._keep_accepted(chunk, chunk.draft, added - 1)
            self._count_draft(sequence, chunk.draft, added - 1)
        # Tokens of one step arrive together; each counts as having taken its part of the time since the last one.
        steps = added if before else added - 1
        self.timings.between_tokens += [(now - (notes.last_token_at if before else now)) / max(1, added)] * steps
        notes.record_token(now)
        return self._output(sequence, "".join(texts), logprobs, before == 0, reason)

    def _note_state(self, launched: InFlightStep, index: int) -> None:
        """Tells the speculator the hidden state that the sequence's last token was sampled from."""
        chunk, own = launched.chunks[index], launched.rows[index].states
        sequence = chunk.sequence
        if self._speculator is None or own.start == own.stop or sequence.finish_reason is not None:
            return
        assert isinstance(launched.output, StepOutput)  # noqa: S101 - it was sampled from
        end = chunk.start + chunk.count
        path = [] if chunk.draft is None else chunk.draft.path(sequence.tokens[end:-1])
        self._speculator.note_state(sequence, launched.output.hidden[own.start + (path[-1] + 1 if path else 0)])

    def _keep_accepted(self, chunk: Chunk, draft: Draft, accepted: int) -> None:
        """Marks the tokens of a draft as computed that are part of the answer now.

        Tokens of a draft that branches have their keys and values where the draft has them: what was accepted is moved
        to where the sequence has it, before anybody can find its blocks.
        """
        sequence, end = chunk.sequence, chunk.start + chunk.count
        path = draft.path(sequence.tokens[end : end + accepted])
        self.runner.move_kv(
            [
                (sequence.slot(end + index), sequence.slot(end + place))
                for place, index in enumerate(path)
                if index != place
            ]
        )
        self.scheduler.mark_accepted(sequence, accepted)

    def _count_draft(self, sequence: Sequence, draft: Draft, accepted: int) -> None:
        """Counts the tokens of a draft of which the first ``accepted`` are part of the answer now."""
        proposed = len(draft.token_ids)
        counts = self._totals.drafts.setdefault(draft.method, DraftCounts())
        counts.drafts += 1
        counts.proposed_tokens += proposed
        counts.accepted_tokens += accepted
        notes = self._states[sequence.id]
        notes.max_computed = max(notes.max_computed, sequence.num_computed)
        if draft.method == PREDICTION:
            sequence.accepted_prediction += accepted
            sequence.rejected_prediction += proposed - accepted

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
        output.prediction_tokens = sequence.accepted_prediction, sequence.rejected_prediction
        if sequence.pooled:
            output.embedding = self._states[sequence.id].mean()
        if sequence.probes:
            output.logits = self._states[sequence.id].logits
        if reason is not None:
            self._end(sequence, reason)
        return output

    def _begin_fetch(self, sequence: Sequence, until: int) -> LoadRequest | None:
        """Starts to fetch a sequence's blocks, from the first that is not computed up to that with this number."""
        kv_blocks, prefix, first = self.runner.kv_blocks, sequence.prefix, sequence.num_registered
        if kv_blocks is None or prefix is None or self._kv_connector is None:
            return None
        blocks = sequence.blocks[first : min(until, first + kv_blocks.most_at_once)]
        incoming = kv_blocks.incoming(blocks)
        if incoming is None:
            return None
        fetch = LoadRequest(sequence.id, prefix, first, blocks, incoming)
        self._kv_connector.fetch(fetch)
        return fetch

    def _offer(self, sequence: Sequence, least: int) -> None:
        """Offloads a sequence's full blocks, as soon as there are so many new ones."""
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
        if self._speculator is not None:
            self._speculator.forget(sequence.id)
        rate = self._states.pop(sequence.id).rate(sequence.num_generated)
        if rate is not None and reason is not FinishReason.ABORTED:
            self.timings.answer_rates.append(rate)
