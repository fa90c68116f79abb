"""One step: its input arrays from the scheduler's chunks, and its result once the runner has computed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from backend.engine.model_runner import SequenceRows, StepInput, StepOutput, pack
from backend.engine.output_processor import SequenceState
from backend.engine.sampler import SampledToken, can_sample_independently, sample, token_logprobs
from backend.engine.scheduler import Chunk
from backend.engine.sequence import Sequence, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Which rows of a step's output belong to one chunk."""

    logits: slice
    hidden: slice


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that has been launched."""

    chunks: list[Chunk]
    rows: list[ChunkRows]
    output: StepOutput | Exception
    """An exception: the step ran out of memory."""
    tokens: PendingTokens | None = None
    """The next tokens of all chunks, sampled on the device; None: the host samples them. If set, the next step can be
    launched on them."""

    @property
    def live(self) -> list[int]:
        """Indices of the chunks whose sequences have not ended since the launch."""
        return [index for index, chunk in enumerate(self.chunks) if chunk.sequence.finish_reason is None]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, by sequence id."""

    sampled: dict[int, SampledToken]
    non_finite: set[int]
    """Sequences for which the model produced values that are not numbers."""


class PendingTokens:
    """One token for each chunk of a step: on the device for the next step, and in an asynchronous copy to the host.

    Args:
        logits: float32 [S, vocab_size] that the tokens were sampled from.
        tokens: int64 [S], where the logits are.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        # If the logits are not numbers, the row of the next step is ignored, so any valid token will do for it.
        self._tokens = tokens.clamp(min=0)
        checked = torch.where(_is_finite(logits), self._tokens, -1)
        self._arrived: torch.cuda.Event | None = None
        if checked.is_cuda:
            self._host = torch.empty(checked.shape, dtype=checked.dtype, pin_memory=True)
            self._host.copy_(checked, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's own gap
            self._arrived.record()
        else:
            self._host = checked

    def of(self, rows: list[int]) -> torch.Tensor:
        """Tokens of some rows, in their order; int64 [len(rows)] on the device."""
        if len(rows) == len(self._tokens):
            return self._tokens
        index = torch.tensor(rows, pin_memory=self._tokens.is_cuda)
        return self._tokens.index_select(0, index.to(self._tokens.device, non_blocking=True))

    def read(self) -> list[int]:
        """Waits for the copy; -1 for logits with values that are not numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        arrived: list[int] = self._host.tolist()
        return arrived


def build_step(chunks: list[Chunk], states: Mapping[int, SequenceState]) -> tuple[StepInput, list[ChunkRows]]:
    """The step of these chunks, and the rows of its output that belong to each; ``states`` by sequence id."""
    sequences: list[SequenceRows] = []
    logits_rows: list[int] = []
    hidden_rows: list[int] = []
    outputs: list[ChunkRows] = []
    begin = 0
    for chunk in chunks:
        sequence, end = chunk.sequence, begin + chunk.count
        tokens = sequence.tokens[chunk.start : chunk.start + chunk.count]
        sequences.append(SequenceRows(tokens, chunk.start, sequence.blocks, sequence.first_block))
        logits_from, hidden_from = _first_wanted(chunk, states[sequence.id])
        first_logits, first_hidden = len(logits_rows), len(hidden_rows)
        logits_rows += range(begin + logits_from, end)
        hidden_rows += range(begin + hidden_from, end)
        outputs.append(ChunkRows(slice(first_logits, len(logits_rows)), slice(first_hidden, len(hidden_rows))))
        begin = end
    return pack(sequences, logits_rows, hidden_rows), outputs


def build_next_step(chunks: list[Chunk], tokens: torch.Tensor) -> tuple[StepInput, list[ChunkRows]]:
    """A step of one row for each chunk, whose tokens int64 [len(chunks)] are on the runner's device."""
    placeholder = [0]  # the runner takes the token from device_tokens
    step = pack(
        [SequenceRows(placeholder, c.start, c.sequence.blocks, c.sequence.first_block) for c in chunks],
        range(len(chunks)),
    )
    rows = [ChunkRows(slice(row, row + 1), slice(0, 0)) for row in range(len(chunks))]
    return replace(step, device_tokens=tokens), rows


def _first_wanted(chunk: Chunk, states: SequenceState) -> tuple[int, int]:
    """First rows, counted in the chunk, from which on logits and hidden states are needed; ``count``: none are.

    Logits: of the last row if a token follows, of all for log-probabilities of the prompt. Hidden states: of a pooled
    sequence those that are not in its sum yet; of another one the last of a chunk that gives no logits, which has
    seen all before it and so shows whether the chunk's numbers are sound.
    """
    sequence, none, last = chunk.sequence, chunk.count, chunk.count - 1
    if sequence.pooled:
        return none, min(max(0, states.num_pooled - chunk.start), none)
    if sequence.params.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.num_prompt:
        return 0, none
    return (last, none) if chunk.reaches_end else (none, last)


def can_sample_ahead(chunks: list[Chunk]) -> bool:
    """Whether a step only samples the next token of each sequence, which the device can do by itself."""
    return all(
        chunk.reaches_end
        and not chunk.sequence.pooled
        and not chunk.sequence.probes
        and chunk.sequence.params.max_tokens > 0
        and chunk.sequence.params.prompt_logprobs is None
        and can_sample_independently(chunk.sequence)
        for chunk in chunks
    )


def collect_result(step: InFlightStep, states: Mapping[int, SequenceState]) -> StepResult:
    """Waits for the result of a step.

    All that may run out of memory after the model is here, and it changes no state before that: it can be retried.

    Raises:
        MemoryError, RuntimeError: the step, or sampling, ran out of memory.
    """
    if isinstance(step.output, Exception):
        raise step.output
    if step.tokens is not None:
        arrived = step.tokens.read()
        chosen = {step.chunks[index].sequence.id: arrived[index] for index in step.live}
        return StepResult(
            {number: SampledToken(token, None) for number, token in chosen.items() if token >= 0},
            {number for number, token in chosen.items() if token < 0},
        )
    return _collect_from_host(step.chunks, step.rows, step.output, states)


def _collect_from_host(
    chunks: list[Chunk], rows: list[ChunkRows], output: StepOutput, states: Mapping[int, SequenceState]
) -> StepResult:
    finite = _finite_rows(output.logits)
    finite_hidden = torch.isfinite(output.hidden.sum(dim=-1)).tolist() if len(output.hidden) else []
    non_finite: set[int] = set()
    sampling: list[Sequence] = []
    sampling_rows: list[int] = []
    for chunk, own in zip(chunks, rows, strict=True):
        sequence = chunk.sequence
        if not (all(finite[own.logits]) and all(finite_hidden[own.hidden])):
            non_finite.add(sequence.id)
        elif sequence.pooled:
            states[sequence.id].pool(output.hidden[own.hidden])
        else:
            if sequence.params.prompt_logprobs is not None:
                _add_prompt_logprobs(chunk, output.logits[own.logits])
            if chunk.reaches_end and sequence.params.max_tokens > 0:
                sampling.append(sequence)
                sampling_rows.append(own.logits.stop - 1)
                if sequence.probes:
                    states[sequence.id].set_logits(output.logits[own.logits.stop - 1])
    if not sampling:
        return StepResult({}, non_finite)
    logits = output.logits
    rows_of_all = logits if len(sampling_rows) == logits.shape[0] else logits[sampling_rows]
    tokens = sample(rows_of_all, sampling)
    return StepResult({s.id: token for s, token in zip(sampling, tokens, strict=True)}, non_finite)


def _is_finite(logits: torch.Tensor) -> torch.Tensor:
    """bool [rows]: whether a row has neither NaN nor plus infinity.

    Tests the sum, which is cheaper than testing each logit. A logit of minus infinity is valid: the token never comes.
    """
    return logits.sum(dim=-1) < torch.inf


def _finite_rows(logits: torch.Tensor) -> list[bool]:
    if logits.is_cuda:
        on_device: list[bool] = _is_finite(logits).tolist()
        return on_device
    # NumPy, because torch would wake its threads for a sum of one row, at several times the cost.
    finite: list[bool] = (logits.numpy().sum(axis=-1) < np.inf).tolist()
    return finite


def _add_prompt_logprobs(chunk: Chunk, logits: torch.Tensor) -> None:
    """Row i of the chunk predicts the token after it. Rows recomputed after a preemption are skipped."""
    sequence = chunk.sequence
    known = sequence.prompt_logprobs
    if not known:
        known.append(TokenLogprobs(sequence.tokens[0], None, ()))
    for row in range(logits.shape[0]):
        predicted = chunk.start + row + 1
        if predicted == len(known) and predicted < sequence.num_prompt:
            distribution = torch.log_softmax(logits[row], dim=-1)
            token_id = sequence.tokens[predicted]
            entry = token_logprobs(distribution, token_id, sequence.params.prompt_logprobs)
            rank = 1 + int((distribution > distribution[token_id]).sum())
            known.append(replace(entry, rank=rank))
