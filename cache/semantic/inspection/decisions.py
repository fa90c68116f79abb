"""The last decisions near a stored question, as operators see them, and the judgements of them."""

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cache.entries.key import namespace_of
from cache.semantic.inspection.what_if import DecidedRequest, WhatIf
from cache.semantic.messages import (
    DecisionsReply,
    DecisionsRequest,
    LookupRequest,
    Outcome,
    SemanticDecision,
    Verdict,
    WhatIfReply,
    WhatIfRequest,
)
from cache.semantic.policy.evidence import FEATURE_NAMES
from cache.semantic.policy.policy import Decision, Evidence
from cache.semantic.wording.comparison import FEATURE_NAMES as WORDING_NAMES
from cache.semantic.wording.comparison import Wording

KEPT = 500
"""Decisions of one process."""
MIN_SIMILARITY = 0.5
"""Below it, a stored question is not near: its answer is not even compared with the fresh one."""


class StoredQuestion(NamedTuple):
    """The stored question nearest to a new one, of those that have the answer in question; see `SemanticDecision`."""

    entry: str
    model: str
    text: str
    similarity: float
    features: dict[str, float]


@dataclass(slots=True, eq=False)
class WatchedDecision:
    """A decision that waits for its judgement."""

    what_if: WhatIf | None
    request: DecidedRequest | None
    shown: SemanticDecision | None

    def judged(self, verdicts: Mapping[str, bool]) -> None:
        """The judge's verdicts on the fresh answer, by the entry whose answer it was compared with."""
        shown = self.shown
        if shown is None or (same := verdicts.get(shown.entry)) is None:
            return
        if self.what_if is not None and self.request is not None:
            self.what_if.judged(self.request, same)
        self._show("same" if same else "different")

    def unsure(self, entry: str) -> None:
        """The judge could not tell whether the fresh answer says the same as that of `entry`."""
        if self.shown is not None and self.shown.entry == entry:
            self._show("unsure")

    def complained(self) -> None:
        """The user has rejected the answer that was served."""
        if self.shown is not None and self.shown.verdict is None:
            self.shown.verdict, self.shown.source = "different", "user"

    def _show(self, verdict: Verdict) -> None:
        if self.shown is not None:
            self.shown.verdict, self.shown.source = verdict, "audit" if self.shown.audit else "miss"


class Decisions:
    """Keeps the last KEPT decisions near a stored question in memory, and counts all for `what_if`.

    Args:
        what_if: None for a policy without a budget.
        shows_questions: whether the texts of both questions are kept as well.
    """

    def __init__(self, what_if: WhatIf | None, shows_questions: bool) -> None:
        self._what_if = what_if
        self._shows_questions = shows_questions
        self._shown: deque[SemanticDecision] = deque(maxlen=KEPT)
        self._last = 0

    def decided(
        self, ask: LookupRequest, max_risk: float, decision: Decision, reason: str, stored: StoredQuestion | None
    ) -> WatchedDecision:
        """Note a decision. `max_risk` is that with which it was made; `reason` is why nothing may be served."""
        now, was_served = time.time(), decision.serve and ask.serve
        request = None
        if self._what_if is not None and not ask.threshold:
            request = self._what_if.decided(decision, max_risk, was_served, now)
        shown = None
        if stored is not None and stored.similarity >= MIN_SIMILARITY:
            shown = self._show(ask, decision, reason, stored, now)
        return WatchedDecision(self._what_if, request, shown)

    def page(self, wanted: DecisionsRequest) -> DecisionsReply:
        """The newest first."""
        found: list[SemanticDecision] = []
        for shown in reversed(self._shown):
            if (not wanted.before or shown.id < wanted.before) and _is_wanted(shown, wanted):
                if len(found) == wanted.limit:
                    return DecisionsReply(tuple(found), found[-1].id)
                found.append(shown)
        return DecisionsReply(tuple(found), 0)

    def forget_texts(self, entries: Collection[str]) -> None:
        """Drop both texts where one is the question of an entry that is kept no more."""
        for shown in self._shown:
            if shown.entry in entries or shown.key in entries:
                shown.question = shown.stored_question = None

    def forget_all_texts(self) -> None:
        """After a purge: a question may belong to what was purged without an entry of its own here."""
        for shown in self._shown:
            shown.question = shown.stored_question = None

    async def what_if(self, wanted: WhatIfRequest) -> WhatIfReply:
        if self._what_if is None:
            return WhatIfReply(None, ())
        last = int(time.time()) // wanted.step
        accounts = await self._what_if.accounts(wanted.deltas, wanted.step, last, wanted.steps)
        return WhatIfReply(self._what_if.delta, accounts)

    def _show(
        self, ask: LookupRequest, decision: Decision, reason: str, stored: StoredQuestion, now: float
    ) -> SemanticDecision:
        self._last += 1
        outcome: Outcome = "refused"
        if decision.serve:
            outcome = "served" if ask.serve else "observed"
        elif decision.refusal == "none near":
            outcome = "vetoed"
        shown = SemanticDecision(
            id=self._last,
            time=now,
            key=ask.key,
            namespace=namespace_of(ask.key),
            entry=stored.entry,
            model=stored.model,
            similarity=stored.similarity,
            features=stored.features,
            risk=None if outcome == "vetoed" else decision.risk,
            limit=decision.limit,
            max_risk=ask.max_risk,
            threshold=ask.threshold or None,
            outcome=outcome,
            reason=reason,
            audit=decision.audit and ask.serve,
            question=ask.text if self._shows_questions else None,
            stored_question=stored.text if self._shows_questions else None,
        )
        self._shown.append(shown)
        return shown


def named_features(weighed: Evidence, wording: Wording) -> dict[str, float]:
    """What a policy judges by, by name: of the neighbours where it has such features, of the wording without a veto."""
    of_neighbours = zip(FEATURE_NAMES, weighed.features.tolist(), strict=False)
    return {**dict(of_neighbours), **dict(zip(WORDING_NAMES, wording.features, strict=False))}


def _is_wanted(shown: SemanticDecision, wanted: DecisionsRequest) -> bool:
    return (
        wanted.outcome in ("", shown.outcome)
        and wanted.verdict in ("", shown.verdict)
        and wanted.namespace in ("", shown.namespace)
        and wanted.model in ("", shown.model)
    )
