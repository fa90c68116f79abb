"""The last decisions near a stored question, as operators see them, and the judgements of them."""

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice

from cache.semantic import messages
from cache.semantic.inspection.what_if import CountedRequest, WhatIf
from cache.semantic.policy.policy import Decision

KEPT = 500
"""Decisions of one process."""


@dataclass(slots=True, eq=False)
class WatchedDecision:
    """A decision near a stored question, as it is `shown`, that waits for its judgement."""

    shown: messages.SemanticDecision
    request: CountedRequest | None

    def judged(self, verdicts: Mapping[str, bool | None]) -> None:
        """The judge's verdicts on the fresh answer, None where it gave none, by the entry that it is compared with."""
        if self.shown.entry not in verdicts:
            return
        same = verdicts[self.shown.entry]
        if self.request is not None and same is not None:
            self.request.judge(same)
        self.shown.verdict = "unsure" if same is None else "same" if same else "different"
        self.shown.source = "audit" if self.shown.audit else "miss"

    def complained(self) -> None:
        """The user has rejected the answer that was served."""
        if self.shown.verdict is None:
            self.shown.verdict, self.shown.source = "different", "user"


class Decisions:
    """Keeps the last KEPT decisions near a stored question in memory, and counts all for `what_if`.

    Args:
        what_if: None for a policy without a budget.
        shows_questions: whether the texts of both questions are kept as well.
    """

    def __init__(self, what_if: WhatIf | None, shows_questions: bool) -> None:
        self._what_if = what_if
        self.shows_questions = shows_questions
        self._shown: deque[messages.SemanticDecision] = deque(maxlen=KEPT)
        self._last = 0

    def add(
        self, ask: messages.LookupRequest, decision: Decision, max_risk: float, shown: messages.SemanticDecision | None
    ) -> WatchedDecision | None:
        """Count a decision, with the risk that it was limited to, and keep what is `shown` of it under the next id.

        Nothing is shown, and None returned, where no question was near.
        """
        request = None
        if self._what_if is not None and not ask.threshold:
            request = self._what_if.count_request(decision, max_risk, decision.serve and ask.serve, time.time())
        if shown is None:
            return None
        self._last += 1
        shown.id = self._last
        self._shown.append(shown)
        return WatchedDecision(shown, request)

    def page(self, wanted: messages.DecisionsRequest) -> messages.DecisionsReply:
        """The newest first."""
        fields = ("outcome", "verdict", "namespace", "model")
        found = (
            shown
            for shown in reversed(self._shown)
            if (not wanted.before or shown.id < wanted.before)
            and all(getattr(wanted, field) in ("", getattr(shown, field)) for field in fields)
        )
        page = tuple(islice(found, wanted.limit))
        return messages.DecisionsReply(page, page[-1].id if next(found, None) else 0)

    def forget_texts(self, entries: Collection[str] | None = None) -> None:
        """Drop both texts where one is the question of an entry that is kept no more; all of them after a purge, for a
        question may belong to what was purged without an entry of its own here.
        """
        for shown in self._shown:
            if entries is None or shown.entry in entries or shown.key in entries:
                shown.question = shown.stored_question = None

    async def what_if(self, wanted: messages.WhatIfRequest) -> messages.WhatIfReply:
        if self._what_if is None:
            return messages.WhatIfReply(None, ())
        last = int(time.time()) // wanted.step
        accounts = await self._what_if.accounts(wanted.deltas, wanted.step, last, wanted.steps)
        return messages.WhatIfReply(self._what_if.delta, accounts)
