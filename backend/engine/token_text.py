"""What a sequence says with one more token: its text, as far as it can be sent, and whether it ends."""

from __future__ import annotations

from dataclasses import dataclass

from backend.engine.sampler import Sampled
from backend.engine.sequence import FinishReason, Sequence, TokenLogprobs
from backend.engine.sequence_notes import PendingLogprobs


@dataclass(frozen=True, slots=True)
class TokenText:
    """What is ready to be sent after a token."""

    text: str
    logprobs: list[TokenLogprobs]
    """Of the tokens that begin in ``text``."""
    reason: FinishReason | None
    """None: the sequence goes on."""


def say(sequence: Sequence, sampled: Sampled, pending: PendingLogprobs, ends: bool) -> TokenText:
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
