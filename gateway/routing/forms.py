"""One request in several forms: an upstream gets the first of which it is not known to lack something."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence

from gateway.upstreams.upstream import PREDICTION, Attempt, Upstream, UpstreamResponse

_MAX_ERROR_BYTES = 2**20
_OK = 200
# What servers answer to a field or a path that they do not know.
_LACKING = frozenset({400, 404, 405, 422, 501})

Send = Callable[[Attempt], Awaitable[UpstreamResponse]]


def possible(upstream: Upstream, attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """The attempts for which the upstream is not known to lack something. One with a prediction is for upstreams whose
    settings say that they take them.
    """
    if not upstream.settings.predictions:
        attempts = [a for a in attempts if PREDICTION not in a.marks]
    lacks = upstream.lacks
    return [a for a in attempts if a.needs not in lacks and lacks.isdisjoint(a.marks)] if lacks else attempts


async def first_possible(
    upstream: Upstream, attempts: Sequence[Attempt], send: Send, keeps_error: bool
) -> UpstreamResponse | None:
    """The answer to the first attempt for which the upstream has what it needs. What it lacks is remembered.

    With `keeps_error` the answer to the last attempt is given, whatever it says.
    """
    lacking: set[str] = set()
    for attempt in attempts:
        if attempt.needs in lacking or not lacking.isdisjoint(attempt.marks):
            continue
        answer = await send(attempt)
        with contextlib.ExitStack() as ending:
            ending.enter_context(answer)
            is_kept = keeps_error and attempt is attempts[-1]
            if not is_kept and (missing := await _missing(answer, attempt)):
                lacking.add(missing)
                continue
            ending.pop_all()
        # Where every attempt fails, the request was at fault: an error that quotes all of it says nothing of a field.
        if answer.status == _OK:
            # What the probe has found is there: the model of this request was not.
            upstream.lacks.update(name for name in lacking if name not in upstream.has)
        return answer
    return None


async def _missing(answer: UpstreamResponse, attempt: Attempt) -> str:
    """What the upstream lacks for this attempt, from its answer; "" for nothing."""
    if answer.status not in _LACKING or (attempt.lacking is None and not attempt.marks):
        return ""
    error = await answer.peek(_MAX_ERROR_BYTES)
    for mark in attempt.marks:
        if mark.encode() in error:
            return mark
    return attempt.needs if attempt.lacking is not None and attempt.lacking(answer.status, error) else ""
