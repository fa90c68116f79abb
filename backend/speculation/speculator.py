"""Which drafts the next step verifies: those that give the most tokens a second."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from backend.engine.scheduler import Chunk
from backend.engine.sequence import PREDICTION, Draft, Sequence
from backend.speculation.acceptance import Acceptance
from backend.speculation.draft_model import DRAFT_MODEL, DraftModel
from backend.speculation.prompt_lookup import Found, TokenText
from backend.speculation.step_costs import StepCosts

PROMPT_LOOKUP = "prompt-lookup"

MAX_DRAFT_TOKENS = 16
"""Of one sequence in one step."""
_CAUTION, _LEAST_GAIN = 1.1, 0.05
"""Drafts are verified where they are expected to give more tokens than their time would without them: so many times
more, and so many tokens more. What is expected is not exact."""
_HOPELESS = 0.9
"""Where drafts would not pay even if their tokens were accepted so often, none are looked for."""

# By the length of the match, 0 to 8: rates to begin with; what happens replaces them.
_EXPECTED_OF_LOOKUP = (0.2, 0.25, 0.35, 0.45, 0.55, 0.6, 0.65, 0.7, 0.75)
_EXPECTED_OF_PREDICTION = (0.6, 0.5, 0.6, 0.7, 0.75, 0.8, 0.8, 0.85, 0.85)
_EXPECTED_OF_MODEL = (0.6,)


@dataclass(slots=True)
class _Candidate:
    """A draft that a sequence could get, before its length is chosen."""

    sequence: Sequence
    method: str
    quality: int
    rate: float
    """The probability that a token is accepted if those before it are."""
    length: int
    found: Found | None
    """None: the draft model has to write it."""


@dataclass(slots=True)
class _Pending:
    """What was proposed for a sequence, or found and not proposed, to be compared with what it became."""

    method: str
    quality: int
    num_tokens: int
    """Of the sequence, when it was found."""
    token_ids: tuple[int, ...]


class AdaptiveSpeculator:
    """Proposes drafts as long as they pay.

    For each sequence of a step the method with the best rate is asked. Then lengths are chosen together: of all tokens
    that could be proposed, those most likely to be accepted come first, and as many are taken as give the most tokens a
    second, by what a step of so many rows takes. At batch 1 a row more costs next to nothing and drafts are long; where
    the step is bound by its rows, none are verified. What was found and not verified is still compared with what the
    sequence became, so that a method that pays again is noticed.

    Args:
        costs: of the target's steps.
        draft_model: writes drafts where nothing is found; None: there is none.
        max_tokens: of one draft.
    """

    def __init__(
        self, costs: StepCosts, draft_model: DraftModel | None = None, max_tokens: int = MAX_DRAFT_TOKENS
    ) -> None:
        self._costs = costs
        self._draft_model = draft_model
        self._max_tokens = max_tokens
        self._texts: dict[int, TokenText] = {}
        self._pending: dict[int, _Pending] = {}
        self._acceptance = {
            PREDICTION: Acceptance(_EXPECTED_OF_PREDICTION),
            PROMPT_LOOKUP: Acceptance(_EXPECTED_OF_LOOKUP),
            DRAFT_MODEL: Acceptance(_EXPECTED_OF_MODEL),
        }

    def propose(self, chunks: list[Chunk], room: int, reserve: Callable[[Sequence, int], int]) -> dict[int, Draft]:
        """See `Speculator`."""
        rows = sum(chunk.count for chunk in chunks)
        ending = [chunk.sequence for chunk in chunks if _may_have_draft(chunk)]
        tokens = sum(chunk.reaches_end for chunk in chunks)
        if not ending or not self._may_pay(rows, tokens, room):
            return {}
        candidates = [candidate for sequence in ending if (candidate := self._candidate(sequence)) is not None]
        lengths = self._lengths(candidates, rows, tokens, room)
        drafts: dict[int, Draft] = {}
        for candidate, length in zip(candidates, lengths, strict=True):
            if candidate.found is None:
                continue
            proposed = tuple(candidate.found.token_ids[: max(1, length)].tolist())
            self._expect(candidate, proposed)
            if length:
                drafts[candidate.sequence.id] = Draft(candidate.method, proposed)
        if self._draft_model is not None:
            by_model = [
                (candidate, length)
                for candidate, length in zip(candidates, lengths, strict=True)
                if candidate.found is None and length
            ]
            written = self._draft_model.write({c.sequence: reserve(c.sequence, length) for c, length in by_model})
            for candidate, _ in by_model:
                if (draft := written.get(candidate.sequence.id)) is not None:
                    self._expect(candidate, draft.token_ids)
                    drafts[candidate.sequence.id] = draft
        return drafts

    def wants_step(self, chunks: list[Chunk]) -> bool:
        """See `Speculator`."""
        ending = [chunk.sequence for chunk in chunks if _may_have_draft(chunk)]
        if not ending or not self._may_pay(len(chunks), len(chunks), self._max_tokens):
            return False
        for sequence in ending:
            candidate = self._candidate(sequence)
            if candidate is not None and candidate.found is not None:
                self._expect(candidate, (int(candidate.found.token_ids[0]),))
            # What the step gives is one token of the candidate; what the next one could verify follows it.
            if candidate is not None and self._pays(len(chunks), len(chunks), 1, candidate.rate**2):
                return True
        return False

    def record(self, chunks: list[Chunk], tokens: int, seconds: float) -> float:
        """See `Speculator`."""
        for chunk in chunks:
            pending = self._pending.pop(chunk.sequence.id, None)
            if pending is None:
                continue
            became = chunk.sequence.tokens[pending.num_tokens :]
            alike = [ours == theirs for ours, theirs in zip(pending.token_ids, became, strict=False)]
            accepted = alike.index(False) if False in alike else len(alike)
            if alike:
                self._acceptance[pending.method].record(chunk.sequence.id, pending.quality, accepted, len(alike))
        self._costs.record(sum(chunk.num_rows for chunk in chunks), seconds)
        plain_tokens = sum(chunk.reaches_end for chunk in chunks)
        plain = self._costs(sum(chunk.count for chunk in chunks))
        return plain * tokens / plain_tokens if plain_tokens else plain

    def forget(self, sequence_id: int) -> None:
        """See `Speculator`."""
        if self._draft_model is not None:
            self._draft_model.forget(sequence_id)
        self._texts.pop(sequence_id, None)
        self._pending.pop(sequence_id, None)
        for acceptance in self._acceptance.values():
            acceptance.forget(sequence_id)

    def _candidate(self, sequence: Sequence) -> _Candidate | None:
        text = self._texts.get(sequence.id)
        if text is None:
            text = self._texts[sequence.id] = TokenText(sequence)
        most = min(self._max_tokens, sequence.params.max_tokens - sequence.num_generated - 1)
        found = text.find(most)
        best = None
        if found is not None and len(found.token_ids):
            method = PREDICTION if found.predicted else PROMPT_LOOKUP
            rate = self._acceptance[method].rate(sequence.id, found.match)
            best = _Candidate(sequence, method, found.match, rate, len(found.token_ids), found)
        if self._draft_model is not None:
            rate = self._acceptance[DRAFT_MODEL].rate(sequence.id, 0)
            if best is None or rate > best.rate:
                best = _Candidate(sequence, DRAFT_MODEL, 0, rate, most, None)
        return best

    def _expect(self, candidate: _Candidate, proposed: tuple[int, ...]) -> None:
        sequence = candidate.sequence
        self._pending[sequence.id] = _Pending(candidate.method, candidate.quality, sequence.num_tokens, proposed)

    def _may_pay(self, rows: int, tokens: int, room: int) -> bool:
        """Whether drafts that are nearly always accepted would pay, of one sequence or of all.

        Args:
            rows, tokens: that the step computes and gives without drafts.
        """
        deepest = self._max_tokens
        gains = np.cumsum(_HOPELESS ** np.arange(1, deepest + 1))
        one, all_of_them = np.arange(1, deepest + 1), tokens * np.arange(1, deepest + 1)
        return any(
            self._pays(rows, tokens, int(added), float(gain))
            for added, gain in (*zip(one, gains, strict=True), *zip(all_of_them, tokens * gains, strict=True))
            if added <= room
        )

    def _pays(self, rows: int, tokens: int, added: int, gain: float, writing: float = 0.0) -> bool:
        """Whether ``added`` rows are worth their time, with which the step would otherwise give tokens as before."""
        plain = self._costs(rows)
        lost = tokens * ((self._costs(rows + added) + writing) / plain - 1)
        return gain > _CAUTION * lost + _LEAST_GAIN

    def _lengths(self, candidates: list[_Candidate], rows: int, tokens: int, room: int) -> list[int]:
        """How many tokens of each candidate to verify: together those that give the most tokens a second."""
        # The next token of each candidate, the likeliest first; a candidate's tokens come in their order.
        queue = [(-candidate.rate, place, 1) for place, candidate in enumerate(candidates) if candidate.length > 0]
        heapq.heapify(queue)
        lengths, best = [0] * len(candidates), [0] * len(candidates)
        most, gain, added, written = tokens / self._costs(rows), 0.0, 0, 0
        while queue and added < room:
            negative, place, depth = heapq.heappop(queue)
            candidate = candidates[place]
            gain -= negative
            added += 1
            lengths[place] = depth
            if candidate.found is None:
                written = max(written, depth)
            if depth < candidate.length:
                heapq.heappush(queue, (negative * candidate.rate, place, depth + 1))
            writing = 0.0 if self._draft_model is None else written * self._draft_model.seconds_per_token
            speed = (tokens + gain) / (self._costs(rows + added) + writing)
            if speed > most and self._pays(rows, tokens, added, gain, writing):
                most, best = speed, list(lengths)
        return best


def _may_have_draft(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    return (
        chunk.reaches_end
        and not sequence.pooled
        and not sequence.probes
        and sequence.params.prompt_logprobs is None
        and sequence.num_generated + 1 < sequence.params.max_tokens
    )
