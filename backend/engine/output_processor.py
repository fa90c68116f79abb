"""From sampled tokens to outputs: text, log-probabilities and the reason why a sequence ends."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from backend.engine.sampler import SampledToken
from backend.engine.sequence import FinishReason, Sequence, TokenLogprobs


@dataclass(slots=True)
class Output:
    """What one step added to one sequence, ready to send."""

    sequence_id: int
    text: str
    logprobs: list[TokenLogprobs]
    """Of the tokens that begin in ``text``; empty unless the sequence asked for them."""
    prompt_logprobs: list[TokenLogprobs]
    """Only in the first output."""
    num_generated: int
    """Tokens generated so far."""
    finish_reason: FinishReason | None
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were in the prefix cache when the sequence first ran."""
    embedding: npt.NDArray[np.float32] | None = None
    """float32 [hidden_size]: mean of the prompt's hidden states, of a pooled sequence."""
    logits: npt.NDArray[np.float32] | None = None
    """float32 [vocab_size]: logits of the last token, of a sequence that asks for them."""
    prediction_tokens: tuple[int, int] = (0, 0)
    """Tokens of the prediction that were accepted and rejected so far."""
    error: str | None = None
    """A sentence for the client, if the reason is ``EXPIRED``, ``SHED`` or ``FAILED`` and the cause is known."""


class SequenceState:
    """State of a sequence that only the engine needs, until the sequence ends."""

    def __init__(self) -> None:
        self.logprobs = PendingLogprobs()
        self.has_started = False
        self.may_have_drafts = True
        """Whether steps may verify drafts of it; not after one that had values that are not numbers."""
        self.max_computed = 0
        """Tokens that have been computed at least once, before a preemption or after it."""
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.num_pooled = 0
        """Prompt tokens whose hidden states are in the sum; none is added again after a preemption."""
        self._sum: npt.NDArray[np.float64] | None = None
        self.logits: npt.NDArray[np.float32] | None = None
        """Logits of the last token, if the sequence asks for them."""

    def record_token(self, now: float) -> None:
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now

    def rate(self, generated: int) -> float | None:
        """Tokens per second after the first; None for fewer than two tokens."""
        seconds = self.last_token_at - self.first_token_at
        return (generated - 1) / seconds if generated > 1 and seconds > 0 else None

    def set_logits(self, logits: torch.Tensor) -> None:
        """Copies a row of logits, float32 [vocab_size]."""
        self.logits = logits.float().cpu().numpy().copy()

    def pool(self, hidden: torch.Tensor) -> None:
        """Adds rows [E, hidden_size] one by one, so that the sum does not depend on the chunks."""
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
    """Log-probabilities of tokens whose text is held back; they are sent with that text."""

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

        A token that completes no character is sent with the text before it.
        """
        self._released = self._produced if count is None else self._released + count
        released = []
        while self._entries and (count is None or self._entries[0][0] < self._released):
            released.append(self._entries.popleft()[1])
        return released


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text that can be sent after a token."""

    text: str
    logprobs: list[TokenLogprobs]
    """Of the tokens that begin in ``text``."""
    reason: FinishReason | None
    """None: the sequence continues."""


def process_token(sequence: Sequence, sampled: SampledToken, pending: PendingLogprobs, ends: bool) -> TokenText:
    """Detokenizes the sequence's newest token and checks whether the sequence ends.

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
        # Stop strings do not end an answer before its min_tokens.
        text, stopped = sequence.stop_strings.add(piece) if sequence.may_end else (piece, False)
        if stopped:
            return TokenText(text, pending.release(len(text)), FinishReason.STOP)
        if sequence.num_generated >= sequence.params.max_tokens:
            reason = FinishReason.LENGTH
    if reason is None:
        return TokenText(text, pending.release(len(text)), None)
    tail, stopped = sequence.stop_strings.add(sequence.detokenizer.finish())
    text += tail if stopped else tail + sequence.stop_strings.finish()
    return TokenText(text, pending.release(None), FinishReason.STOP if stopped else reason)
