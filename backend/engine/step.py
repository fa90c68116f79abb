"""A step between its launch and the moment when the host takes over what it computed."""

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
    """What was launched, and where its result will be."""

    chunks: list[Chunk]
    rows: list[ChunkRows]
    output: StepOutput | Exception
    """An exception: the step did not fit the memory."""
    tokens: PendingTokens | None = None
    """If a device is choosing the next token of every chunk already; then the next step can be launched on them."""

    @property
    def live(self) -> list[int]:
        """Indices of the chunks whose sequences have not ended since the launch."""
        return [index for index, chunk in enumerate(self.chunks) if chunk.sequence.finish_reason is None]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, by sequence id."""

    sampled: dict[int, SampledToken]
    poisoned: set[int]
    """Sequences for which the model produced values that are not numbers."""


class PendingTokens:
    """One token for each chunk of a step: on the device for the next step, and in a copy that is coming to the host.

    Args:
        logits: float32 [S, vocab_size], of which the tokens were chosen.
        tokens: int64 [S], where the logits are.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        # Where the logits are unsound no token is right, and any that exists will do for the row of the next step,
        # which nobody looks at.
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
        """Waits for the copy; -1 where the logits had values that are not numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        arrived: list[int] = self._host.tolist()
        return arrived


def build_step(chunks: list[Chunk], notes: Mapping[int, SequenceState]) -> tuple[StepInput, list[ChunkRows]]:
    """One step of these chunks, and where each will find its output; ``notes`` by sequence id."""
    sequences: list[SequenceRows] = []
    logits_rows: list[int] = []
    hidden_rows: list[int] = []
    outputs: list[ChunkRows] = []
    begin = 0
    for chunk in chunks:
        sequence, end = chunk.sequence, begin + chunk.count
        tokens = sequence.tokens[chunk.start : chunk.start + chunk.count]
        sequences.append(SequenceRows(tokens, chunk.start, sequence.blocks, sequence.first_block))
        logits_from, hidden_from = _first_wanted(chunk, notes[sequence.id])
        first_logits, first_hidden = len(logits_rows), len(hidden_rows)
        logits_rows += range(begin + logits_from, end)
        hidden_rows += range(begin + hidden_from, end)
        outputs.append(ChunkRows(slice(first_logits, len(logits_rows)), slice(first_hidden, len(hidden_rows))))
        begin = end
    return pack(sequences, logits_rows, hidden_rows), outputs


def build_next_step(chunks: list[Chunk], tokens: torch.Tensor) -> tuple[StepInput, list[ChunkRows]]:
    """A step of one row for each chunk, whose tokens int64 [len(chunks)] are on the runner's device."""
    not_here = [0]  # one row; the runner takes its token from device_tokens
    step = pack(
        [SequenceRows(not_here, c.start, c.sequence.blocks, c.sequence.first_block) for c in chunks],
        range(len(chunks)),
    )
    rows = [ChunkRows(slice(row, row + 1), slice(0, 0)) for row in range(len(chunks))]
    return replace(step, device_tokens=tokens), rows


def _first_wanted(chunk: Chunk, notes: SequenceState) -> tuple[int, int]:
    """First rows, counted in the chunk, from which on logits and hidden states are needed; ``count``: none are.

    Logits: of the last row if a token follows, of all for log-probabilities of the prompt. Hidden states: of a pooled
    sequence those that are not in its sum yet; of another one the last of a chunk that gives no logits, which has
    seen all before it and so shows whether the chunk's numbers are sound.
    """
    sequence, none, last = chunk.sequence, chunk.count, chunk.count - 1
    if sequence.pooled:
        return none, min(max(0, notes.num_pooled - chunk.start), none)
    if sequence.params.prompt_logprobs and len(sequence.prompt_logprobs) < sequence.num_prompt:
        return 0, none
    return (last, none) if chunk.reaches_end else (none, last)


def can_sample_ahead(chunks: list[Chunk]) -> bool:
    """Whether a step is there for the next token of each of its sequences, which the device can choose by itself."""
    return all(
        chunk.reaches_end
        and not chunk.sequence.pooled
        and not chunk.sequence.probes
        and chunk.sequence.params.max_tokens > 0
        and not chunk.sequence.params.prompt_logprobs
        and can_sample_independently(chunk.sequence)
        for chunk in chunks
    )


def collect_result(flight: InFlightStep, notes: Mapping[int, SequenceState]) -> StepResult:
    """Waits for what a step computed.

    What can run out of memory after the model is here, and it changes nothing that a second try would miss.

    Raises:
        MemoryError, RuntimeError: the step, or the choice of its tokens, does not fit the memory.
    """
    if isinstance(flight.output, Exception):
        raise flight.output
    if flight.tokens is not None:
        arrived = flight.tokens.read()
        chosen = {flight.chunks[index].sequence.id: arrived[index] for index in flight.live}
        return StepResult(
            {number: SampledToken(token, None) for number, token in chosen.items() if token >= 0},
            {number for number, token in chosen.items() if token < 0},
        )
    return _collect_from_host(flight.chunks, flight.rows, flight.output, notes)


def _collect_from_host(
    chunks: list[Chunk], rows: list[ChunkRows], output: StepOutput, notes: Mapping[int, SequenceState]
) -> StepResult:
    finite = _finite_rows(output.logits)
    finite_hidden = torch.isfinite(output.hidden.sum(dim=-1)).tolist() if len(output.hidden) else []
    poisoned: set[int] = set()
    sampling: list[Sequence] = []
    sampling_rows: list[int] = []
    for chunk, own in zip(chunks, rows, strict=True):
        sequence = chunk.sequence
        if not (all(finite[own.logits]) and all(finite_hidden[own.hidden])):
            poisoned.add(sequence.id)
        elif sequence.pooled:
            notes[sequence.id].pool(output.hidden[own.hidden])
        else:
            if sequence.params.prompt_logprobs:
                _add_prompt_logprobs(chunk, output.logits[own.logits])
            if chunk.reaches_end and sequence.params.max_tokens > 0:
                sampling.append(sequence)
                sampling_rows.append(own.logits.stop - 1)
                if sequence.probes:
                    notes[sequence.id].set_logits(output.logits[own.logits.stop - 1])
    if not sampling:
        return StepResult({}, poisoned)
    logits = output.logits
    rows_of_all = logits if len(sampling_rows) == logits.shape[0] else logits[sampling_rows]
    tokens = sample(rows_of_all, sampling)
    return StepResult({s.id: token for s, token in zip(sampling, tokens, strict=True)}, poisoned)


def _is_finite(logits: torch.Tensor) -> torch.Tensor:
    """bool [rows]: whether a row has only numbers.

    A sum is not a number as soon as one of its terms is not, and is cheaper than a look at each. A logit of minus
    infinity is a token that never comes, and no fault.
    """
    return logits.sum(dim=-1) < torch.inf


def _finite_rows(logits: torch.Tensor) -> list[bool]:
    if logits.is_cuda:
        on_device: list[bool] = _is_finite(logits).tolist()
        return on_device
    # On the host numpy: torch would wake its threads for a sum of one row, at several times the cost.
    finite: list[bool] = (logits.numpy().sum(axis=-1) < np.inf).tolist()
    return finite


def _add_prompt_logprobs(chunk: Chunk, logits: torch.Tensor) -> None:
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
