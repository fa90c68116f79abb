"""Which drafts the next step verifies: those that give the most tokens a second."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from backend.engine.scheduler import Chunk
from backend.engine.sequence import PREDICTION, Draft, Sequence
from backend.speculation.acceptance import Acceptance
from backend.speculation.draft_model import DRAFT_MODEL, DraftModel
from backend.speculation.medusa import MEDUSA, MedusaHeads
from backend.speculation.prompt_lookup import LONGEST_MATCH, TokenText
from backend.speculation.step_costs import StepCosts

if TYPE_CHECKING:
    import torch

PROMPT_LOOKUP = "prompt-lookup"

MAX_DRAFT_TOKENS = 16
"""Of one sequence in one step."""
_CAUTION, _LEAST_GAIN = 1.1, 0.05
"""Drafts are verified where they are expected to give more tokens than their time would without them: so many times
more, and so many tokens more. What is expected is not exact."""
_HOPELESS = 0.9
"""Where drafts would not pay even if their tokens were accepted so often, none are looked for."""
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 256
"""Tokens of a sequence until Medusa's heads are asked again after they did not pay; twice as many each time."""

# By the length of the match, 0 to 8: rates to begin with; what happens replaces them.
_EXPECTED_OF_LOOKUP = (0.2, 0.25, 0.35, 0.45, 0.55, 0.6, 0.65, 0.7, 0.75)
_EXPECTED_OF_PREDICTION = (0.6, 0.5, 0.6, 0.7, 0.75, 0.8, 0.8, 0.85, 0.85)
_EXPECTED_OF_MODEL = (0.6,)
_EXPECTED_OF_MEDUSA = (1.0,)
"""Accepted tokens of those that the heads' own probabilities promise."""
assert len(_EXPECTED_OF_LOOKUP) == len(_EXPECTED_OF_PREDICTION) == LONGEST_MATCH + 1  # noqa: S101


@dataclass(slots=True)
class _Candidate:
    """A draft that a sequence could get, before its length is chosen."""

    sequence: Sequence
    method: str
    quality: int
    gains: tuple[float, ...]
    """For each token that could be proposed the probability that it is accepted with all that it follows; falling."""
    token_ids: tuple[int, ...] = ()
    """Empty: the draft model has to write them."""
    parents: tuple[int, ...] = ()
    """As a draft has them."""


@dataclass(slots=True)
class _Pending:
    """What was proposed for a sequence, or found and not proposed, to be compared with what it became."""

    quality: int
    num_tokens: int
    """Of the sequence, when it was found."""
    draft: Draft
    expected: float
    """Accepted tokens, by the heads' own probabilities."""


@dataclass(slots=True)
class _Pause:
    """When Medusa's heads are asked again for a sequence."""

    until: int = 0
    """Tokens of the sequence."""
    length: int = _FIRST_PAUSE


class AdaptiveSpeculator:
    """Proposes drafts as long as they pay.

    For each sequence of a step the method with the best prospects is asked. Then lengths are chosen together: of all
    tokens that could be proposed, those most likely to be accepted come first, and as many are taken as give the most
    tokens a second, by what a step of so many rows takes. At batch 1 a row more costs next to nothing and drafts are
    long; where the step is bound by its rows, none are verified. What was found and not verified is still compared with
    what the sequence became, so that a method that pays again is noticed.

    Args:
        costs: of the target's steps.
        draft_model: writes drafts where nothing is found; None: there is none.
        medusa: heads that propose trees of tokens; None: there are none.
        max_tokens: of one draft.
    """

    def __init__(
        self,
        costs: StepCosts,
        draft_model: DraftModel | None = None,
        medusa: MedusaHeads | None = None,
        max_tokens: int = MAX_DRAFT_TOKENS,
    ) -> None:
        self.wants_states = medusa is not None
        self._costs = costs
        self._draft_model = draft_model
        self._medusa = medusa
        self._max_tokens = max_tokens
        self._depths = np.arange(1, max_tokens + 1)
        self._hopeless_gains = np.cumsum(_HOPELESS**self._depths)
        self._texts: dict[int, TokenText] = {}
        self._states: dict[int, tuple[int, torch.Tensor]] = {}
        self._pauses: dict[int, _Pause] = {}
        self._pending: dict[int, _Pending] = {}
        self._acceptance = {
            PREDICTION: Acceptance(_EXPECTED_OF_PREDICTION),
            PROMPT_LOOKUP: Acceptance(_EXPECTED_OF_LOOKUP),
            DRAFT_MODEL: Acceptance(_EXPECTED_OF_MODEL),
            MEDUSA: Acceptance(_EXPECTED_OF_MEDUSA),
        }

    def propose(self, chunks: list[Chunk], room: int, reserve: Callable[[Sequence, int], int]) -> dict[int, Draft]:
        """See `Speculator`."""
        rows = sum(chunk.count for chunk in chunks)
        ending = [chunk.sequence for chunk in chunks if _may_have_draft(chunk)]
        tokens = sum(chunk.reaches_end for chunk in chunks)
        if not ending or not self._may_pay(rows, tokens, room):
            return {}
        candidates = self._candidates(ending)
        lengths = self._lengths(candidates, rows, tokens, room)
        drafts: dict[int, Draft] = {}
        to_write: dict[Sequence, int] = {}
        for candidate, length in zip(candidates, lengths, strict=True):
            sequence = candidate.sequence
            if candidate.method == MEDUSA:
                self._pause(sequence, length)
            if not candidate.token_ids:
                if length:
                    to_write[sequence] = reserve(sequence, length)
                continue
            found = Draft(candidate.method, candidate.token_ids, parents=candidate.parents)
            shadow = found.shortened(max(1, length))
            if shadow is not None:
                self._expect(candidate, shadow)
                if length:
                    drafts[sequence.id] = shadow
        if self._draft_model is not None and to_write:
            written = self._draft_model.write(to_write)
            for candidate in candidates:
                if (draft := written.get(candidate.sequence.id)) is not None:
                    self._expect(candidate, draft)
                    drafts[candidate.sequence.id] = draft
        return drafts

    def wants_step(self, chunks: list[Chunk]) -> bool:
        """See `Speculator`."""
        ending = [chunk.sequence for chunk in chunks if _may_have_draft(chunk)]
        if not ending or not self._may_pay(len(chunks), len(chunks), self._max_tokens):
            return False
        candidates = []
        for sequence in ending:
            if self._is_asked(sequence):
                return True
            candidate = self._found(sequence)
            if candidate is None:
                continue
            if candidate.token_ids:
                self._expect(candidate, Draft(candidate.method, candidate.token_ids[:1]))
            # What the step gives is one token of the candidate; what the next one could verify follows it.
            candidates.append(replace(candidate, gains=candidate.gains[1:]))
        most = self._max_tokens * len(candidates)
        return any(self._lengths(candidates, len(chunks), len(chunks), most))

    def record(self, chunks: list[Chunk], tokens: int, seconds: float) -> float:
        """See `Speculator`."""
        for chunk in chunks:
            pending = self._pending.pop(chunk.sequence.id, None)
            if pending is None:
                continue
            became = chunk.sequence.tokens[pending.num_tokens :]
            if not became:
                continue
            draft = pending.draft
            accepted = len(draft.path(became))
            verified = pending.expected if draft.method == MEDUSA else min(accepted + 1, len(draft.token_ids))
            self._acceptance[draft.method].record(chunk.sequence.id, pending.quality, accepted, verified)
        has_drafts = any(chunk.draft is not None for chunk in chunks)
        self._costs.record(sum(chunk.num_rows for chunk in chunks), seconds, drafted=has_drafts)
        plain_tokens = sum(chunk.reaches_end for chunk in chunks)
        plain = self._costs.plain(sum(chunk.count for chunk in chunks))
        return plain * tokens / plain_tokens if plain_tokens else plain

    def note_state(self, sequence: Sequence, state: torch.Tensor) -> None:
        """See `Speculator`."""
        if self._medusa is not None:
            self._states[sequence.id] = sequence.num_tokens, state.to("cpu", copy=True)

    def forget(self, sequence_id: int) -> None:
        """See `Speculator`."""
        if self._draft_model is not None:
            self._draft_model.forget(sequence_id)
        for known in (self._texts, self._states, self._pauses, self._pending):
            known.pop(sequence_id, None)
        for acceptance in self._acceptance.values():
            acceptance.forget(sequence_id)

    def _candidates(self, sequences: list[Sequence]) -> list[_Candidate]:
        """The best draft of each sequence that could get one."""
        found = {sequence: candidate for sequence in sequences if (candidate := self._found(sequence)) is not None}
        asked = [sequence for sequence in sequences if self._is_asked(sequence)]
        if self._medusa is not None and asked:
            trees = self._medusa.trees([self._states[sequence.id][1] for sequence in asked], self._max_tokens)
            for sequence, tree in zip(asked, trees, strict=True):
                scale = self._acceptance[MEDUSA].rate(sequence.id, 0)
                gains = tuple(min(1.0, scale * probability) for probability in tree.probabilities)
                other = found.get(sequence)
                if other is None or sum(gains) > sum(other.gains):
                    found[sequence] = _Candidate(sequence, MEDUSA, 0, gains, tree.token_ids, tree.parents)
        return list(found.values())

    def _found(self, sequence: Sequence) -> _Candidate | None:
        """What the sequence's texts have, or the draft model would write."""
        text = self._texts.get(sequence.id)
        if text is None:
            text = self._texts[sequence.id] = TokenText(sequence)
        most = min(self._max_tokens, sequence.params.max_tokens - sequence.num_generated - 1)
        found = text.find(most)
        best: _Candidate | None = None
        if found is not None and len(found.token_ids):
            method = PREDICTION if found.predicted else PROMPT_LOOKUP
            rate = self._acceptance[method].rate(sequence.id, found.match)
            ids = tuple(found.token_ids.tolist())
            best = _Candidate(sequence, method, found.match, _powers(rate, len(ids)), ids)
        if self._draft_model is not None:
            gains = _powers(self._acceptance[DRAFT_MODEL].rate(sequence.id, 0), most)
            if best is None or gains[0] > best.gains[0]:
                best = _Candidate(sequence, DRAFT_MODEL, 0, gains)
        return best

    def _is_asked(self, sequence: Sequence) -> bool:
        """Whether Medusa's heads are asked for a draft of the sequence now."""
        known = self._states.get(sequence.id)
        if self._medusa is None or known is None or known[0] != sequence.num_tokens:
            return False
        pause = self._pauses.get(sequence.id)
        return pause is None or sequence.num_tokens >= pause.until

    def _pause(self, sequence: Sequence, length: int) -> None:
        """Notes whether a draft of Medusa's paid, for then the heads were worth their time."""
        if length:
            self._pauses.pop(sequence.id, None)
            return
        pause = self._pauses.setdefault(sequence.id, _Pause())
        pause.until = sequence.num_tokens + pause.length
        pause.length = min(2 * pause.length, _LONGEST_PAUSE)

    def _expect(self, candidate: _Candidate, draft: Draft) -> None:
        sequence = candidate.sequence
        expected = 0.0
        if candidate.method == MEDUSA:
            expected = sum(candidate.gains[: len(draft.token_ids)]) / self._acceptance[MEDUSA].rate(sequence.id, 0)
        self._pending[sequence.id] = _Pending(candidate.quality, sequence.num_tokens, draft, expected)

    def _may_pay(self, rows: int, tokens: int, room: int) -> bool:
        """Whether drafts that are nearly always accepted would pay, of one sequence or of all.

        Args:
            rows, tokens: that the step computes and gives without drafts.
        """
        for sequences in (1, tokens):
            added = sequences * self._depths
            lost = tokens * (self._costs.relative(rows, added) - 1)
            pays = sequences * self._hopeless_gains > _CAUTION * lost + _LEAST_GAIN
            if pays[added <= room].any():
                return True
        return False

    def _pays(self, rows: int, tokens: int, added: int, gain: float, writing: float = 0.0) -> bool:
        """Whether ``added`` rows are worth their time, with which the step would otherwise give tokens as before."""
        plain = self._costs.plain(rows)
        lost = tokens * ((self._costs.drafted(rows + added) + writing) / plain - 1)
        return gain > _CAUTION * lost + _LEAST_GAIN

    def _lengths(self, candidates: list[_Candidate], rows: int, tokens: int, room: int) -> list[int]:
        """How many tokens of each candidate to verify: together those that give the most tokens a second."""
        # The next token of each candidate, the likeliest first; a candidate's tokens come in their order.
        queue = [(-candidate.gains[0], place) for place, candidate in enumerate(candidates) if candidate.gains]
        heapq.heapify(queue)
        lengths, best = [0] * len(candidates), [0] * len(candidates)
        most, gain, added, written = tokens / self._costs.plain(rows), 0.0, 0, 0
        # The heads have been asked already, so their time is part of what a token of theirs takes.
        asked = any(candidate.method == MEDUSA for candidate in candidates)
        heads = self._medusa.seconds if self._medusa is not None and asked else 0.0
        per_token = 0.0 if self._draft_model is None else self._draft_model.seconds_per_token
        while queue and added < room:
            negative, place = heapq.heappop(queue)
            candidate = candidates[place]
            gain -= negative
            added += 1
            lengths[place] += 1
            if not candidate.token_ids:
                written = max(written, lengths[place])
            if lengths[place] < len(candidate.gains):
                heapq.heappush(queue, (-candidate.gains[lengths[place]], place))
            writing = written * per_token + heads
            speed = (tokens + gain) / (self._costs.drafted(rows + added) + writing)
            if speed > most and self._pays(rows, tokens, added, gain, writing):
                most, best = speed, list(lengths)
        return best


def _powers(rate: float, count: int) -> tuple[float, ...]:
    """Of a draft in which each token is accepted at this rate if those before it are."""
    return tuple((rate ** np.arange(1, count + 1)).tolist())


def _may_have_draft(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    return (
        chunk.reaches_end
        and not sequence.pooled
        and not sequence.probes
        and sequence.params.prompt_logprobs is None
        and sequence.num_generated + 1 < sequence.params.max_tokens
    )
