"""One step: its input arrays from the scheduler's chunks, and its result once the runner has computed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from backend.engine.model_runner import SequenceRows, StepInput, StepOutput, pack
from backend.engine.output_processor import SequenceState
from backend.engine.sampler import (
    SampledToken,
    accept_or_sample,
    can_sample_independently,
    sample,
    token_logprobs,
)
from backend.engine.scheduler import Chunk
from backend.engine.sequence import Draft, Sequence, TokenLogprobs
from backend.errors import is_out_of_memory


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Which rows of a step's output belong to one chunk."""

    logits: slice
    """The last one is what the next token is sampled from, if the chunk reaches the end."""
    hidden: slice
    draft: slice
    """Rows of logits after each token of its draft."""
    states: slice
    """Rows of hidden states, of the last token of the chunk and of each one of its draft; empty: nobody wants them."""


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

    sampled: dict[int, Iterable[SampledToken]]
    """The next tokens of a sequence: one, and one more for each token of its draft that is the token before it. Each is
    sampled when it is asked for, which has to be after the sequence has appended the one before it."""
    non_finite: set[int]
    """Sequences for which the model produced values that are not numbers."""


class Speculator(Protocol):
    """Proposes drafts, and learns from what becomes of them."""

    wants_states: bool
    """Whether it is told the hidden states that tokens are sampled from."""

    def propose(self, chunks: list[Chunk], room: int, reserve: Callable[[Sequence, int], int]) -> dict[int, Draft]:
        """Drafts by sequence id, for the chunks that end with their sequence.

        Args:
            chunks: of the step that is to be launched.
            room: rows that the step may have besides.
            reserve: see `Scheduler.reserve`.
        """
        ...

    def wants_step(self, chunks: list[Chunk]) -> bool:
        """Whether it may have drafts for the step after this one, which is then not launched ahead."""
        ...

    def record(self, chunks: list[Chunk], tokens: int, seconds: float) -> float:
        """Notes a step whose tokens the sequences have.

        Args:
            tokens: that it gave.
            seconds: from its launch until now.

        Returns:
            Estimated seconds for as many tokens without drafts.
        """
        ...

    def note_state(self, sequence: Sequence, state: torch.Tensor) -> None:
        """Notes the hidden state that a sequence's last token was sampled from.

        Args:
            state: float32 [hidden_size], after the last norm; valid until the runner's next step.
        """
        ...

    def forget(self, sequence_id: int) -> None:
        """Notes that a sequence has ended."""
        ...


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


def build_step(
    chunks: list[Chunk], states: Mapping[int, SequenceState], wants_states: bool = False
) -> tuple[StepInput, list[ChunkRows]]:
    """The step of these chunks, and the rows of its output that belong to each; ``states`` by sequence id.

    Args:
        wants_states: whether hidden states are wanted of all tokens that another one is sampled after.
    """
    sequences: list[SequenceRows] = []
    logits_rows: list[int] = []
    hidden_rows: list[int] = []
    outputs: list[ChunkRows] = []
    begin = 0
    for chunk in chunks:
        sequence, end = chunk.sequence, begin + chunk.count
        tokens = sequence.tokens[chunk.start : chunk.start + chunk.count]
        if chunk.draft is not None:
            tokens += chunk.draft.token_ids
        parents = () if chunk.draft is None else chunk.draft.parents
        sequences.append(SequenceRows(tokens, chunk.start, sequence.blocks, sequence.first_block, parents))
        logits_from, hidden_from = _first_wanted(chunk, states[sequence.id])
        first_logits, first_hidden = len(logits_rows), len(hidden_rows)
        logits_rows += range(begin + logits_from, end)
        hidden_rows += range(begin + hidden_from, end)
        first_drafted, begin = len(logits_rows), begin + chunk.num_rows
        logits_rows += range(end, begin)
        first_state = len(hidden_rows)
        if wants_states and chunk.reaches_end and not sequence.pooled:
            hidden_rows += range(end - 1, begin)
        outputs.append(
            ChunkRows(
                slice(first_logits, first_drafted),
                slice(first_hidden, first_state),
                slice(first_drafted, len(logits_rows)),
                slice(first_state, len(hidden_rows)),
            )
        )
    return pack(sequences, logits_rows, hidden_rows), outputs


def build_next_step(chunks: list[Chunk], tokens: torch.Tensor) -> tuple[StepInput, list[ChunkRows]]:
    """A step of one row for each chunk, whose tokens int64 [len(chunks)] are on the runner's device."""
    placeholder = [0]  # the runner takes the token from device_tokens
    step = pack(
        [SequenceRows(placeholder, c.start, c.sequence.blocks, c.sequence.first_block) for c in chunks],
        range(len(chunks)),
    )
    none = slice(0, 0)
    rows = [ChunkRows(slice(row, row + 1), none, none, none) for row in range(len(chunks))]
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
        and chunk.draft is None
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
            {number: [SampledToken(token, None)] for number, token in chosen.items() if token >= 0},
            {number for number, token in chosen.items() if token < 0},
        )
    return _collect_from_host(step.chunks, step.rows, step.output, states)


def _collect_from_host(
    chunks: list[Chunk], rows: list[ChunkRows], output: StepOutput, states: Mapping[int, SequenceState]
) -> StepResult:
    finite = _finite_rows(output.logits)
    finite_hidden = torch.isfinite(output.hidden.sum(dim=-1)).tolist() if len(output.hidden) else []
    non_finite: set[int] = set()
    sampling: list[tuple[Chunk, ChunkRows]] = []
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
                sampling.append((chunk, own))
                if sequence.probes:
                    states[sequence.id].set_logits(output.logits[own.logits.stop - 1])
    return StepResult(_sample_all(sampling, output.logits, finite), non_finite)


def _sample_all(
    sampling: list[tuple[Chunk, ChunkRows]], logits: torch.Tensor, finite: list[bool]
) -> dict[int, Iterable[SampledToken]]:
    """The next tokens of these chunks' sequences, by sequence id; ``finite`` as in `_verified`, for all rows."""
    first: dict[int, SampledToken] = {}
    together: list[Sequence] = []
    rows: list[int] = []
    for chunk, own in sampling:
        if chunk.draft is not None and chunk.draft.probabilities is not None:
            last = logits[own.logits.stop - 1 : own.logits.stop]
            first[chunk.sequence.id] = _sample_beside(chunk.draft, 0, last, chunk.sequence)
        else:
            together.append(chunk.sequence)
            rows.append(own.logits.stop - 1)
    if together:
        tokens = sample(logits if len(rows) == logits.shape[0] else logits[rows], together)
        first.update((sequence.id, token) for sequence, token in zip(together, tokens, strict=True))
    return {
        chunk.sequence.id: [first[chunk.sequence.id]]
        if chunk.draft is None
        else _verified(chunk.sequence, first[chunk.sequence.id], chunk.draft, logits[own.draft], finite[own.draft])
        for chunk, own in sampling
    }


def _verified(
    sequence: Sequence, token: SampledToken, draft: Draft, logits: torch.Tensor, finite: list[bool]
) -> Iterator[SampledToken]:
    """A token, and then another one after each token of the draft that follows as the tokens did.

    A token that was not drawn counts as proposed with probability 1. To accept it with its own probability, or else to
    draw from the other tokens, is to draw and to look whether it is the one proposed. So an answer is the same with any
    such draft and without one, token for token, as far as the runner computes the same logits.

    Args:
        token: sampled from the row before the draft.
        logits: float32 [len(draft.token_ids), vocab_size]; changed in place.
        finite: whether a row has only numbers; one that has not, and what follows it, is not used.
    """
    yield token
    index = draft.following(-1, token.token_id)
    while index is not None and finite[index]:
        try:
            token = _sample_beside(draft, index + 1, logits[index : index + 1], sequence)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return  # what follows is computed again by the next step
        yield token
        index = draft.following(index, token.token_id)


def _sample_beside(draft: Draft, place: int, logits: torch.Tensor, sequence: Sequence) -> SampledToken:
    """Samples the token at the place of one of the draft's, or after the last; ``logits`` float32 [1, vocab_size]."""
    if draft.probabilities is None or place == len(draft.token_ids):
        return sample(logits, [sequence])[0]
    return accept_or_sample(logits, sequence, draft.token_ids[place], draft.probabilities[place])


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
