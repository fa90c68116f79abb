"""A step between its launch and the moment when the host takes over what it computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from backend.engine.runner import StepOutput
from backend.engine.sampler import Sampled, draws_alone, sample, token_logprobs
from backend.engine.scheduler import Chunk
from backend.engine.sequence import Sequence, TokenLogprobs
from backend.engine.sequence_notes import SequenceNotes
from backend.engine.step_input import ChunkRows


@dataclass(frozen=True, slots=True)
class Flight:
    """What was launched, and where its result will be."""

    chunks: list[Chunk]
    rows: list[ChunkRows]
    output: StepOutput | Exception
    """An exception: the step did not fit the memory."""
    tokens: TokensOnTheWay | None = None
    """If a device is choosing the next token of every chunk already; then the next step can be launched on them."""

    @property
    def live(self) -> list[int]:
        """Indices of the chunks whose sequences have not ended since the launch."""
        return [index for index, chunk in enumerate(self.chunks) if chunk.sequence.finish_reason is None]


@dataclass(frozen=True, slots=True)
class Landed:
    """What a step computed, by sequence id."""

    sampled: dict[int, Sampled]
    poisoned: set[int]
    """Sequences for which the model produced values that are not numbers."""


class TokensOnTheWay:
    """One token for each chunk of a step: on the device for the next step, and in a copy that is coming to the host.

    Args:
        logits: float32 [S, vocab_size], of which the tokens were chosen.
        tokens: int64 [S], where the logits are.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        # Where the logits are unsound no token is right, and any that exists will do for the row of the next step,
        # which nobody looks at.
        self._tokens = tokens.clamp(min=0)
        checked = torch.where(_sound(logits), self._tokens, -1)
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


def gives_only_tokens(chunks: list[Chunk]) -> bool:
    """Whether a step is there for the next token of each of its sequences, which the device can choose by itself."""
    return all(
        chunk.reaches_end
        and not chunk.sequence.pooled
        and not chunk.sequence.probes
        and chunk.sequence.params.max_tokens > 0
        and not chunk.sequence.params.prompt_logprobs
        and draws_alone(chunk.sequence)
        for chunk in chunks
    )


def land(flight: Flight, notes: Mapping[int, SequenceNotes]) -> Landed:
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
        return Landed(
            {number: Sampled(token, None) for number, token in chosen.items() if token >= 0},
            {number for number, token in chosen.items() if token < 0},
        )
    return _land_on_host(flight.chunks, flight.rows, flight.output, notes)


def _land_on_host(
    chunks: list[Chunk], rows: list[ChunkRows], output: StepOutput, notes: Mapping[int, SequenceNotes]
) -> Landed:
    sound = _sound_rows(output.logits)
    sound_hidden = torch.isfinite(output.hidden.sum(dim=-1)).tolist() if len(output.hidden) else []
    poisoned: set[int] = set()
    sampling: list[Sequence] = []
    sampling_rows: list[int] = []
    for chunk, own in zip(chunks, rows, strict=True):
        sequence = chunk.sequence
        if not (all(sound[own.logits]) and all(sound_hidden[own.hidden])):
            poisoned.add(sequence.id)
        elif sequence.pooled:
            notes[sequence.id].pool(output.hidden[own.hidden])
        else:
            if sequence.params.prompt_logprobs:
                _note_prompt_logprobs(chunk, output.logits[own.logits])
            if chunk.reaches_end and sequence.params.max_tokens > 0:
                sampling.append(sequence)
                sampling_rows.append(own.logits.stop - 1)
                if sequence.probes:
                    notes[sequence.id].note_logits(output.logits[own.logits.stop - 1])
    if not sampling:
        return Landed({}, poisoned)
    logits = output.logits
    rows_of_all = logits if len(sampling_rows) == logits.shape[0] else logits[sampling_rows]
    tokens = sample(rows_of_all, sampling)
    return Landed({s.id: token for s, token in zip(sampling, tokens, strict=True)}, poisoned)


def _sound(logits: torch.Tensor) -> torch.Tensor:
    """bool [rows]: whether a row has only numbers.

    A sum is not a number as soon as one of its terms is not, and is cheaper than a look at each. A logit of minus
    infinity is a token that never comes, and no fault.
    """
    return logits.sum(dim=-1) < torch.inf


def _sound_rows(logits: torch.Tensor) -> list[bool]:
    if logits.is_cuda:
        on_device: list[bool] = _sound(logits).tolist()
        return on_device
    # On the host numpy: torch would wake its threads for a sum of one row, at several times the cost.
    sound: list[bool] = (logits.numpy().sum(axis=-1) < np.inf).tolist()
    return sound


def _note_prompt_logprobs(chunk: Chunk, logits: torch.Tensor) -> None:
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
