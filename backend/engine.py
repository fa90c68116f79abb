"""The engine: one step after the other over all sequences. Used by one thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from backend.block_pool import BlockPool
from backend.runner import BLOCK_SIZE, ModelRunner, StepInput
from backend.sampler import Sampled, sample, token_logprobs
from backend.scheduler import Chunk, Scheduler
from backend.sequence import FinishReason, Sequence, TokenLogprobs


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
    """Prompt tokens whose keys and values were there already."""
    embedding: npt.NDArray[np.float32] | None = None
    """float32 [hidden_size]: mean of the prompt's hidden states, of a pooled sequence."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A picture of the engine after a step."""

    running: int
    waiting: int
    free_blocks: int
    prompt_tokens: int
    """Prompt tokens computed since the start, recomputation after a preemption included."""
    generated_tokens: int
    preemptions: int


class Engine:
    """Continuous batching: sequences join and leave between any two steps.

    Args:
        runner: what computes; its ``num_blocks`` bound the memory.
        max_batch: sequences that run at the same time.
        step_tokens: tokens computed in one step at most.
    """

    def __init__(self, runner: ModelRunner, max_batch: int, step_tokens: int) -> None:
        self.runner = runner
        self.pool = BlockPool(runner.num_blocks)
        self.scheduler = Scheduler(self.pool, max_batch, step_tokens)
        self._sequences: dict[int, Sequence] = {}
        self._pending_logprobs: dict[int, _PendingLogprobs] = {}
        self._eos = frozenset(runner.config.eos_token_ids)
        self._prompt_tokens = 0
        self._generated_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            ValueError: prompt and answer cannot fit the KV memory even alone.
        """
        longest = sequence.num_prompt + sequence.params.max_tokens
        if sequence.num_prompt < 1 or longest > self.pool.num_blocks * BLOCK_SIZE:
            raise ValueError(f"a sequence of up to {longest} tokens does not fit {self.pool.num_blocks} KV blocks")
        self._sequences[sequence.id] = sequence
        self._pending_logprobs[sequence.id] = _PendingLogprobs()
        self.scheduler.add(sequence)

    def abort(self, sequence_id: int) -> None:
        """Drops a sequence and frees its blocks; nothing happens if it has ended already."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ABORTED)

    def fail_all(self) -> list[Output]:
        """Ends every sequence with ``FAILED`` and frees all blocks."""
        outputs = []
        for sequence in list(self._sequences.values()):
            self._end(sequence, FinishReason.FAILED)
            outputs.append(Output(sequence.id, "", [], [], sequence.num_generated, FinishReason.FAILED))
        return outputs

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences)

    def stats(self) -> EngineStats:
        """Counts for metrics."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_blocks=self.pool.num_free,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self.scheduler.num_preemptions,
        )

    def step(self) -> list[Output]:
        """Computes one step and returns what it added, for each sequence that got a token."""
        chunks = self.scheduler.schedule()
        logits = self.runner.run(_step_input(chunks)).logits
        return self._postprocess(chunks, logits)

    def _postprocess(self, chunks: list[Chunk], logits: torch.Tensor) -> list[Output]:
        sampling: list[Sequence] = []
        sampling_rows: list[int] = []
        first = 0
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.count
            self._prompt_tokens += max(0, min(sequence.num_prompt, chunk.start + chunk.count) - chunk.start)
            wanted = len(_wanted_rows(chunk))
            if wanted and sequence.params.prompt_logprobs:
                self._note_prompt_logprobs(chunk, logits[first : first + wanted])
            first += wanted
            if chunk.reaches_end:
                sampling.append(sequence)
                sampling_rows.append(first - 1)
        if not sampling:
            return []
        rows = logits if len(sampling_rows) == logits.shape[0] else logits[sampling_rows]
        generating = [sequence.params.max_tokens > 0 for sequence in sampling]
        if not all(generating):
            ended = [s for s, generates in zip(sampling, generating, strict=True) if not generates]
            kept = [index for index, generates in enumerate(generating) if generates]
            finished = [self._finish_without_tokens(sequence) for sequence in ended]
            sampling, rows = [sampling[index] for index in kept], rows[kept]
        else:
            finished = []
        return finished + [self._advance(s, r) for s, r in zip(sampling, sample(rows, sampling), strict=True)]

    def _note_prompt_logprobs(self, chunk: Chunk, logits: torch.Tensor) -> None:
        """Row i of the chunk predicts the token after it. Rows computed again after a preemption are known."""
        sequence = chunk.sequence
        known = sequence.prompt_logprobs
        if not known:
            known.append(TokenLogprobs(sequence.tokens[0], None, ()))
        for row in range(logits.shape[0]):
            predicted = chunk.start + row + 1
            if predicted == len(known) and predicted < sequence.num_prompt:
                distribution = torch.log_softmax(logits[row], dim=-1)
                known.append(token_logprobs(distribution, sequence.tokens[predicted], sequence.params))

    def _advance(self, sequence: Sequence, sampled: Sampled) -> Output:
        """Appends a token, turns it into text, and ends the sequence if it is time."""
        first = sequence.num_generated == 0
        sequence.append(sampled.token_id)
        self._generated_tokens += 1
        pending = self._pending_logprobs[sequence.id]
        reason: FinishReason | None = None
        if sampled.token_id in self._eos and not sequence.params.ignore_eos:
            reason, text = FinishReason.STOP, ""
        else:
            piece = sequence.detokenizer.add(sampled.token_id)
            pending.add(sampled.logprobs, piece)
            text, stopped = sequence.stop_strings.add(piece)
            if stopped:
                reason = FinishReason.STOP
            elif sequence.num_generated >= sequence.params.max_tokens:
                reason = FinishReason.LENGTH
            if stopped:
                logprobs = pending.release(len(text))
                return self._output(sequence, text, logprobs, first, reason)
        if reason is not None:
            tail, stopped = sequence.stop_strings.add(sequence.detokenizer.finish())
            text += tail if stopped else tail + sequence.stop_strings.finish()
            reason = FinishReason.STOP if stopped else reason
        logprobs = pending.release(len(text) if reason is None else None)
        return self._output(sequence, text, logprobs, first, reason)

    def _finish_without_tokens(self, sequence: Sequence) -> Output:
        return self._output(sequence, "", [], True, FinishReason.LENGTH)

    def _output(
        self,
        sequence: Sequence,
        text: str,
        logprobs: list[TokenLogprobs],
        first: bool,
        reason: FinishReason | None,
    ) -> Output:
        if reason is not None:
            self._end(sequence, reason)
        prompt_logprobs = sequence.prompt_logprobs if first else []
        return Output(sequence.id, text, logprobs, prompt_logprobs, sequence.num_generated, reason)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.scheduler.remove(sequence)
        del self._sequences[sequence.id]
        del self._pending_logprobs[sequence.id]


class _PendingLogprobs:
    """Log-probabilities of tokens whose text is still held back; they are sent with the text they belong to."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, TokenLogprobs]] = deque()
        self._produced = 0
        self._released = 0

    def add(self, logprobs: TokenLogprobs | None, text: str) -> None:
        if logprobs is not None:
            self._entries.append((self._produced, logprobs))
        self._produced += len(text)

    def release(self, count: int | None) -> list[TokenLogprobs]:
        """Entries of the tokens that begin in the next ``count`` characters; None: all that is left.

        A token that completes no character begins where the text stands, and goes out with what comes before it.
        """
        self._released = self._produced if count is None else self._released + count
        released = []
        while self._entries and (count is None or self._entries[0][0] < self._released):
            released.append(self._entries.popleft()[1])
        return released


def _wanted_rows(chunk: Chunk) -> range:
    """Rows of the chunk (counted in it) whose logits are needed: mostly the last, or none."""
    sequence = chunk.sequence
    if sequence.params.prompt_logprobs and len(sequence.prompt_logprobs) < sequence.num_prompt:
        return range(chunk.count)
    return range(chunk.count - 1, chunk.count) if chunk.reaches_end else range(0)


def _step_input(chunks: list[Chunk]) -> StepInput:
    tokens: list[int] = []
    starts = [0]
    logits_rows: list[int] = []
    widest = max(len(chunk.sequence.blocks) for chunk in chunks)
    tables = np.zeros((len(chunks), widest), dtype=np.int32)
    for index, chunk in enumerate(chunks):
        sequence = chunk.sequence
        tokens += sequence.tokens[chunk.start : chunk.start + chunk.count]
        tables[index, : len(sequence.blocks)] = sequence.blocks
        logits_rows += [starts[-1] + row for row in _wanted_rows(chunk)]
        starts.append(starts[-1] + chunk.count)
    counts = np.diff(starts)
    rows = np.repeat(np.arange(len(chunks)), counts)
    first_positions = np.array([chunk.start for chunk in chunks])
    positions = np.arange(len(tokens)) - np.repeat(starts[:-1], counts) + first_positions[rows]
    slots = tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepInput(
        token_ids=np.array(tokens, dtype=np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slots,
        query_starts=np.array(starts, dtype=np.int32),
        block_tables=tables,
        logits_rows=np.array(logits_rows, dtype=np.int32),
    )
