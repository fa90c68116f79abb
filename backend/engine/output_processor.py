"""What the engine remembers of a sequence while it has not ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from backend.engine.sampler import SampledToken
from backend.engine.sequence import FinishReason, Sequence, TokenLogprobs


class SequenceState:
    """What the engine remembers of a sequence while it has not ended."""

    def __init__(self) -> None:
        self.logprobs = PendingLogprobs()
        self.has_started = False
        self.max_computed = 0
        """Tokens that have been computed at least once."""
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.num_pooled = 0
        """Prompt tokens whose hidden states are in the sum; a preemption does not add them again."""
        self._sum: npt.NDArray[np.float64] | None = None
        self.logits: npt.NDArray[np.float32] | None = None
        """Of the token that was sampled last, of a sequence that wants them."""

    def record_token(self, now: float) -> None:
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now

    def rate(self, generated: int) -> float | None:
        """Tokens per second after the first; None if there is nothing to divide."""
        seconds = self.last_token_at - self.first_token_at
        return (generated - 1) / seconds if generated > 1 and seconds > 0 else None

    def set_logits(self, logits: torch.Tensor) -> None:
        """Copies a row of logits, float32 [vocab_size]."""
        self.logits = logits.float().cpu().numpy().copy()

    def pool(self, hidden: torch.Tensor) -> None:
        """Adds rows [E, hidden_size], one after the other, so that the sum does not depend on how they were cut."""
        rows = hidden.double().cpu().numpy()
        if not len(rows):
            return
        if self._sum is not None:
            rows = np.concatenate([self._sum[None], rows])
        self._sum = np.add.accumulate(rows, axis=0)[-1]
        self.num_pooled += hidden.shape[0]

    def mean(self) -> npt.NDArray[np.float32]:
        """Mean of the rows so far; float32 [hidden_size]."""
        if self._sum is None:
            raise RuntimeError("a pooled sequence ended without a hidden state")
        return (self._sum / self.num_pooled).astype(np.float32)


class PendingLogprobs:
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


@dataclass(frozen=True, slots=True)
class TokenText:
    """What is ready to be sent after a token."""

    text: str
    logprobs: list[TokenLogprobs]
    """Of the tokens that begin in ``text``."""
    reason: FinishReason | None
    """None: the sequence goes on."""


def process_token(sequence: Sequence, sampled: SampledToken, pending: PendingLogprobs, ends: bool) -> TokenText:
    """Turns the sequence's newest token into text.

    Args:
        sampled: the token, which the sequence has appended already.
        pending: takes the token's log-probabilities until its text is sent.
        ends: the token is an end token, which has no text.
    """
    reason: FinishReason | None = None
    if ends:
        reason, text = FinishReason.STOP, ""
    else:
        piece = sequence.detokenizer.add(sampled.token_id)
        pending.add(sampled.logprobs, piece)
        text, stopped = sequence.stop_strings.add(piece)
        if stopped:
            return TokenText(text, pending.release(len(text)), FinishReason.STOP)
        if sequence.num_generated >= sequence.params.max_tokens:
            reason = FinishReason.LENGTH
    if reason is None:
        return TokenText(text, pending.release(len(text)), None)
    tail, stopped = sequence.stop_strings.add(sequence.detokenizer.finish())
    text += tail if stopped else tail + sequence.stop_strings.finish()
    return TokenText(text, pending.release(None), FinishReason.STOP if stopped else reason)
