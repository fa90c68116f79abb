"""What gateways and the process of the semantic cache say to each other over a Unix socket.

Each message is a line of JSON (https://jsonlines.org): [number, message]. A reply has the number of its request; a
note, which has no reply, has number 0.
"""

from typing import Any, Literal

import msgspec

from cache.entries.generations import Purge

Layer = Literal["normalized", "semantic"]
Outcome = Literal["served", "observed", "vetoed", "refused"]
Verdict = Literal["same", "different", "unsure"]
Step = Literal[60, 3600]
"""Seconds of a minute or an hour."""

MAX_TEXT = 600
"""Characters of a question that may be fuzzy. What is longer is a document, and would hold up the others."""
MAX_BODY = 64 * 2**10
"""Bytes of a response whose answer may be compared with another."""
MAX_MODEL = 256
"""Characters of the name of a model."""
MAX_LINE = 2**21
"""Bytes of a reply."""


class QuestionRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a lookup and an explanation have in common.

    `max_risk`, from 0 to 1, is the most risk that the client allows. With a `threshold` above 0, it alone decides: see
    `ThresholdPolicy`.
    """

    partition: str
    text: str
    max_risk: float
    threshold: float = 0.0


class LookupRequest(QuestionRequest, frozen=True, array_like=True, tag="ask", kw_only=True):
    """Is there an answer to a question like this one?

    `key` is the id of the request's key. Without `serve` the answer to this is not sent to anybody, only counted.
    `traceparent` names the trace that it is part of (W3C), "" for none.
    """

    key: str
    serve: bool
    traceparent: str = ""


class LookupReply(msgspec.Struct, frozen=True, array_like=True):
    """The reply to `LookupRequest`. `query` is its number, for the answer that may follow.

    `similarity` is that of the question that vouches for the answer which is meant, or of the nearest one that has it,
    where there is a veto; `risk` is the probability that this answer is wrong. Both are None where nobody knows. The
    answer of most votes is meant or, with a threshold, that of the nearest neighbour.
    `entry` is an answer to that question that may go to who asks, computed at `created` (Unix seconds); "" for none.
    """

    query: int
    similarity: float | None = None
    risk: float | None = None
    entry: str = ""
    created: float = 0.0


class LookupHit(LookupReply, frozen=True, array_like=True, tag="found", kw_only=True):
    """The answer of `entry` may be served, if it is the one that was computed at `created`.

    With `audit`, the upstream is to be asked all the same.
    """

    layer: Layer
    audit: bool


class LookupMiss(LookupReply, frozen=True, array_like=True, tag="not found"):
    """No answer may be served: that of `entry` may be like it, and no more. `veto` is the name of what forbids
    it, "" where it would not be served without the veto either.
    """

    veto: str = ""


HitOrMiss = LookupHit | LookupMiss


class RiskFeature(msgspec.Struct, frozen=True):
    """What a feature adds to the `log_odds` that an answer is wrong: its value times its weight, as learned then.

    What adds nothing is left out. "uncertainty" is no feature of the question: it is the standard deviation of what the
    others add up to.
    """

    name: str
    value: float
    weight: float
    log_odds: float


class ExplainRequest(QuestionRequest, frozen=True, array_like=True, tag="explain"):
    """What would be said to this question? Nothing is counted, learned or spent."""


class ExplainedNeighbour(msgspec.Struct, frozen=True, array_like=True):
    """A question near to another: its entry, and the cosine of the two.

    `has_answer` says whether it has the answer that is meant, and so is one of those that a lookup compares
    the new question with; `veto` is then the name of what forbids that it vouches for this answer, or "".
    """

    entry: str
    similarity: float
    has_answer: bool
    veto: str


class Explanation(msgspec.Struct, frozen=True, array_like=True, tag="explained"):
    """The reply to `ExplainRequest`. `layer` would serve `entry`, or is "" if none would; then `entry` has the answer
    that could have been. `risk` is that of this answer and `features` what makes it; `reason` is a sentence.
    """

    layer: str
    entry: str
    risk: float | None
    reason: str
    neighbours: tuple[ExplainedNeighbour, ...] = ()
    features: tuple[RiskFeature, ...] = ()


class AnswerStored(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """A note: the upstream has answered a question, and the answer is kept under `entry` until `expires`, Unix s.

    `query` is the number of what was asked before, 0 if nothing was. `body` is the response object, JSON; empty if
    it is too long to be compared.
    """

    query: int
    entry: str
    partition: str
    text: str
    model: str
    generation: str
    created: float
    expires: float
    body: bytes


class RefreshRequested(msgspec.Struct, frozen=True, array_like=True, tag="retried"):
    """A note: the client wants a fresh answer to a request, whatever was served for it before."""

    key: str


class HitDiscarded(msgspec.Struct, frozen=True, array_like=True, tag="unused"):
    """A note: what was found for a request was not served after all, or its client does not wait any more for a lookup
    that may still run.
    """

    key: str


class EntryDeleted(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """A note: an entry is no longer kept; where `created` is not 0, only the one of that time."""

    entry: str
    created: float = 0.0


class Purged(msgspec.Struct, frozen=True, array_like=True, tag="purged"):
    """A note: every entry that a purge covers is no longer kept."""

    purge: Purge


class WrongAnswerReport(msgspec.Struct, frozen=True, array_like=True, tag="wrong"):
    """What was served from `entry` for other questions than its own was wrong: evict it, and learn."""

    entry: str


class WrongAnswerResult(msgspec.Struct, frozen=True, array_like=True, tag="evicted"):
    """Whether there was such an entry, and how many servings of it were taken for wrong."""

    was_there: bool
    labels: int


class StatsRequest(msgspec.Struct, frozen=True, array_like=True, tag="describe"):
    """What are the figures of the moment?"""


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="description"):
    figures: dict[str, Any]


class SemanticDecision(msgspec.Struct, kw_only=True):
    """What was decided of the answer to a stored question that is near to a new one, at `time` (Unix seconds).

    `key` is the id that the new question's own answer has, `namespace` its tenant, `entry` the id of the stored answer
    and `model` the one that has computed it. `veto` is the name of what forbids this answer, or "". `risk` is that of
    the answer, without regard to a veto, and `features` are what makes it, the largest part first; `limit` is the
    highest that was served then, and `max_risk` what the request allowed. `threshold` is the similarity that it asked
    for, null where it left that to the policy.

    `outcome` is served; observed, where it would be served if the mode were on; vetoed, where it would be served or
    observed without the veto; or refused, for `reason`. `verdict` is that of the judge on the fresh answer, which
    `source` has brought: a miss, an audit, or the rejection of a user, who says no more than "different". Both are null
    before it is known.

    `question` and `stored_question` are null unless the operator shows them (semantic.show_questions).
    """

    id: int
    time: float
    key: str
    namespace: str
    entry: str
    model: str
    similarity: float
    veto: str
    features: tuple[RiskFeature, ...]
    risk: float | None
    limit: float | None
    max_risk: float
    threshold: float | None
    outcome: Outcome
    reason: str
    audit: bool
    verdict: Verdict | None = None
    source: Literal["miss", "audit", "user"] | None = None
    question: str | None = None
    stored_question: str | None = None


class DecisionsRequest(msgspec.Struct, frozen=True, array_like=True, tag="decisions"):
    """The last decisions, the newest first: `limit` of them, older than the one with the id `before`, 0 for all. A text
    that is not empty says which.
    """

    limit: int
    before: int = 0
    outcome: Outcome | Literal[""] = ""
    verdict: Verdict | Literal[""] = ""
    namespace: str = ""
    model: str = ""


class DecisionsReply(msgspec.Struct, frozen=True, array_like=True, tag="decided"):
    """`next` is the `before` of the next page, 0 after the last one."""

    decisions: tuple[SemanticDecision, ...]
    next: int


class WhatIfPoint(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` and `hits` of a minute or an hour from `time`, Unix seconds. `wrong` and `wrong_upper` are of all that
    is kept up to its end, since in one step too little is judged; None before the first request.
    """

    time: int
    requests: int = 0
    hits: int = 0
    wrong: float | None = None
    wrong_upper: float | None = None


class WhatIfAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What the budget would have served with `delta` of the `requests` from `since` on, Unix seconds.

    Of its `hits`, `judged` were judged, in fact as misses or audits, and `found_wrong` of these called different.
    `wrong` is the share of the requests that would have got a wrong answer, and `wrong_upper` the bound on it that
    holds with 95 % confidence. `points` are those of each minute or hour, the oldest first.
    """

    delta: float
    since: float | None
    requests: int
    hits: int
    judged: int
    found_wrong: int
    wrong: float
    wrong_upper: float
    points: tuple[WhatIfPoint, ...]


class WhatIfRequest(msgspec.Struct, frozen=True, array_like=True, tag="what if"):
    """What would have been served with these deltas, with some of each where there are none, up to now?"""

    deltas: tuple[float, ...]
    step: Step
    steps: int


class WhatIfReply(msgspec.Struct, frozen=True, array_like=True, tag="would have"):
    """`delta` is the policy's own; None where it keeps no budget, and then there are no accounts."""

    delta: float | None
    accounts: tuple[WhatIfAccount, ...]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The question cannot be answered now; `reason` says why."""

    reason: str


Request = LookupRequest | ExplainRequest | WrongAnswerReport | StatsRequest | DecisionsRequest | WhatIfRequest
Note = AnswerStored | RefreshRequested | HitDiscarded | EntryDeleted | Purged
Reply = HitOrMiss | Explanation | WrongAnswerResult | Stats | DecisionsReply | WhatIfReply | Refused

from_gateway = msgspec.json.Decoder(tuple[int, Request | Note]).decode
"""Number and message of a line. Raises msgspec.DecodeError for what no gateway of this version sends."""
from_service = msgspec.json.Decoder(tuple[int, Reply]).decode
"""Number and reply of a line. Raises msgspec.DecodeError for what no service of this version sends."""


def line_of(number: int, message: Request | Note | Reply) -> bytes:
    """The message as it travels: JSON in one line."""
    return msgspec.json.encode((number, message)) + b"\n"
