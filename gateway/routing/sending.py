"""One call, sent until an upstream answers it: retries, pauses and hedges.

candidates ──► _send ──► an answer                              → returned
                 └─────► Failure: FREELY, ANYWHERE, ELSEWHERE   → the next candidate at once
                                  FREELY, ANYWHERE              → when none is left: the same ones, after pauses
                                  NOWHERE                       → it is over
"""

import asyncio
import heapq
import logging
import random
import re
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from gateway import metrics
from gateway.errors import (
    DeadlineExceeded,
    NoUpstream,
    TooManyRequests,
    UpstreamDisconnected,
    UpstreamError,
    UpstreamUnreachable,
)
from gateway.http.sse import EVENT_STREAM, NotAnEvent, splitter_of
from gateway.routing.budget import RetryBudget
from gateway.routing.call import RouteCall
from gateway.routing.failures import Failure, Retry, is_fault, retry_after, retry_of_status
from gateway.routing.forms import first_possible, possible
from gateway.routing.strategy import RouteRequest, Strategy
from gateway.settings.upstreams import HedgeSettings, RetrySettings
from gateway.tenants.credentials import NAMESPACE_HEADER
from gateway.upstreams.breaker import Admission
from gateway.upstreams.identity import with_cache_salt
from gateway.upstreams.upstream import Attempt, Upstream, UpstreamResponse

log = logging.getLogger(__name__)

_MAX_ERROR_BYTES = 2**20
_HELD_BYTES = 2**20
_ERROR_DEADLINE = 10.0
# However long a Retry-After: an upstream that others stand in for is tried again now and then.
_LONGEST_BUSY = 600.0
# Whoever waited this long for a failure does not wait for the same one again.
_QUICK = 1.0
_OK = 200
# What says that a credential is unknown, or not paid for.
_KEY_REFUSED = frozenset({401, 402})
_SERVER_ERROR = 500
_STREAMS = (EVENT_STREAM, "application/x-ndjson")
_HTML = ("text/html", "application/xhtml+xml")
# What some servers say with status 200, and as the first event of a stream.
_ERROR = re.compile(rb'(?:event: ?error\s|(?:data: ?)?\{\s*"error"\s*:\s*["{])')

_check_json = msgspec.json.Decoder(msgspec.Raw).decode


class Sending:
    """The state of one call. `deadline` is a time of the event loop."""

    def __init__(
        self,
        call: RouteCall,
        deadline: float,
        retries: RetrySettings,
        hedging: HedgeSettings,
        budget: RetryBudget,
        hedge_budget: RetryBudget,
        probed: Sequence[str],
    ) -> None:
        self._call = call
        self._deadline = deadline
        self._retries = retries
        self._hedging = hedging
        self._budget = budget
        self._hedge_budget = hedge_budget
        self._probed = probed
        self._loop = asyncio.get_running_loop()
        self._sent_again = 0
        self._newest_retry = 0.0  # when the request was sent again; 0 if the newest try is none
        self._pauses: dict[Upstream, int] = {}
        self._is_suspect = False
        self.failures: list[Failure] = []
        self.absent: NoUpstream | None = None
        """Why there was no upstream to send it to, for some model."""
        self.is_over = False
        """Whether it may be sent to no upstream any more, of no model."""
        self.lacks = False
        """Whether some upstream lacks what every form of the request needs."""

    async def to(
        self,
        candidates: Callable[[], Sequence[Upstream]],
        attempts: Sequence[Attempt],
        strategy: Strategy | None,
        asked: RouteRequest,
    ) -> UpstreamResponse | None:
        """The answer of the first of the candidates that gives one; None if none does, as `failures` say, or if the
        call `is_over`. Those that have become candidates since the others were asked are asked too.
        """
        pending = deque(candidates())
        known = set(pending)
        later: list[tuple[float, int, Upstream]] = []
        first = len(self.failures)
        is_free = True
        while not self.is_over:
            if not pending:
                pending.extend(upstream for upstream in candidates() if upstream not in known)
                known.update(pending)
            if pending:
                if not is_free and not self._may_retry():
                    break
                upstream = pending.popleft()
            elif later and self._may_retry():
                due, _, upstream = heapq.heappop(later)
                await asyncio.sleep(due - self._loop.time())
            else:
                break
            given = await self._hedged(upstream, pending, attempts, strategy, asked)
            if isinstance(given, UpstreamResponse):
                if self._newest_retry:
                    self._budget.give_back(self._newest_retry)
                if given.status == _OK:
                    _blame(self.failures[first:])
                return given
            self._newest_retry = 0.0
            for failure in given:
                self._note(failure, has_others=bool(pending))
                if failure.can_repeat and (time := self._due(failure)) is not None:
                    heapq.heappush(later, (time, len(self.failures), failure.upstream))
            is_free = all(failure.retry is Retry.FREELY for failure in given)
            if self._is_hopeless(given):
                break
        return None

    def _is_hopeless(self, failures: Sequence[Failure]) -> bool:
        """Whether the newest failures show that further upstreams of the model would fail too."""
        self.is_over = any(failure.retry is Retry.NOWHERE for failure in failures)
        suspect = sum(failure.retry is Retry.ELSEWHERE for failure in failures)
        was_suspect, self._is_suspect = self._is_suspect, self._is_suspect or suspect > 0
        return suspect > (0 if was_suspect else 1)

    def _note(self, failure: Failure, *, has_others: bool) -> None:
        self.failures.append(failure)
        metrics.upstream_failures.labels(failure.upstream.label, failure.label).inc()
        if (has_others or len(self.failures) > 1) and not failure.is_left_alone:
            log.warning("%s%s", failure.message, " Trying another upstream." if has_others else "")

    def _may_retry(self) -> bool:
        """Whether the request may be sent once more; if so that is counted."""
        now = self._loop.time()
        if self._sent_again >= self._retries.attempts or now >= self._deadline:
            return False
        if not self._budget.take(now, self._retries.budget):
            return False
        self._sent_again, self._newest_retry = self._sent_again + 1, now
        metrics.upstream_retries.inc()
        return True

    def _due(self, failure: Failure) -> float | None:
        """When the upstream may be asked again; None if that is too late. Full jitter keeps callers apart (Brooker,
        "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
        """
        count = self._pauses.get(failure.upstream, 0)
        self._pauses[failure.upstream] = count + 1
        retries = self._retries
        pause = random.uniform(0, min(retries.longest_pause, 2 * retries.first_pause * 2**count))  # noqa: S311  # no secret
        if failure.retry_after is not None:
            if failure.retry_after > retries.longest_pause:
                return None
            pause += failure.retry_after
        due = self._loop.time() + pause
        return due if due < self._deadline else None

    async def _hedged(
        self,
        upstream: Upstream,
        pending: deque[Upstream],
        attempts: Sequence[Attempt],
        strategy: Strategy | None,
        asked: RouteRequest,
    ) -> UpstreamResponse | Sequence[Failure]:
        """An answer, or the failures of those that were asked, if any was; if the upstream takes long to begin, the
        next of the pending ones is asked as well.
        """
        if not (self._hedging.after and pending and self._call.is_repeatable and attempts and attempts[0].family):
            given = await self._send(upstream, attempts, strategy, asked)
            return given if isinstance(given, UpstreamResponse) else () if given is None else (given,)
        tasks: list[asyncio.Task[UpstreamResponse | Failure | None]] = []
        winner: UpstreamResponse | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks.append(group.create_task(self._send(upstream, attempts, strategy, asked)))
                await asyncio.wait(tasks, timeout=self._hedging.after)
                if not tasks[0].done() and self._may_hedge(pending[0]):
                    metrics.hedged_requests.inc()
                    tasks.append(group.create_task(self._send(pending.popleft(), attempts, strategy, asked)))
                first = await _first_answer(tasks)
                for task in tasks:
                    task.cancel()
            winner = first
        finally:  # also answers of the turn in which all was cancelled
            for task in tasks:
                if (answer := _answer_of(task)) is not None and answer is not winner:
                    answer.end()
        if winner is not None:
            return winner
        return [failure for task in tasks if isinstance(failure := task.result(), Failure)]

    def _may_hedge(self, other: Upstream) -> bool:
        """Whether another upstream may be asked as well; if so that is counted."""
        is_idle = other.state == "up" and not other.slots.is_full
        return is_idle and self._hedge_budget.take(self._loop.time(), self._hedging.share)

    async def _send(
        self, upstream: Upstream, attempts: Sequence[Attempt], strategy: Strategy | None, asked: RouteRequest
    ) -> UpstreamResponse | Failure | None:
        """The answer of one upstream, once it has begun; None if it `lacks` what every attempt needs."""
        attempts = possible(upstream, attempts)
        if not attempts:
            self.lacks = True
            return None
        breaker = upstream.breaker
        admission = breaker.admit()
        if admission is Admission.REFUSED:
            return _left_alone(upstream)
        is_trial = admission is Admission.TRIAL
        if strategy is not None:
            strategy.sent(upstream, asked)
        began = self._loop.time()
        # The error of an endpoint that is not known to be lacking may be about something else in the request.
        keeps_error = attempts[-1].needs in self._probed
        try:
            answer = await first_possible(
                upstream, attempts, lambda attempt: self._request(upstream, attempt), keeps_error
            )
            if answer is None:
                self.lacks = True
                if is_trial:
                    breaker.leave_trial()
                return None
            try:
                failure = await self._failure_of(answer, is_trial)
            except BaseException:
                answer.end()
                raise
        except UpstreamError as error:
            return self._failure_from(upstream, error, self._loop.time() - began, is_trial)
        except BaseException:
            if is_trial:
                breaker.leave_trial()
            # It has taken so long at least: who is always hedged or left would seem quick.
            if (seconds := self._loop.time() - began) > upstream.latency:
                upstream.note_latency(seconds)
            raise
        if failure is None:
            if answer.status == _OK:  # an error is quick
                upstream.note_latency(self._loop.time() - began)
            breaker.began()
            answer.watch()
            return answer
        if failure.is_fault:
            breaker.failed(is_trial=is_trial)
        elif is_trial:
            breaker.leave_trial()
        return failure if self._call.is_repeatable else answer

    async def _request(self, upstream: Upstream, attempt: Attempt) -> UpstreamResponse:
        call = self._call
        own = {**call.own, **attempt.own}
        if upstream.has_own_key and call.namespace:
            own.setdefault(NAMESPACE_HEADER, call.namespace)
        body = attempt.body
        if body and upstream.takes_salts:
            body = with_cache_salt(body, call.namespace)
        answer = await upstream.request(
            call.method,
            attempt.path,
            call.headers,
            body,
            own,
            attempt.dropped,
            deadline=self._deadline,
            tells_deadline=call.deadline is not None,
            priority=call.priority,
        )
        answer.attempt = attempt
        return answer

    async def _failure_of(self, answer: UpstreamResponse, is_trial: bool) -> Failure | None:
        """Why the answer does not count; None if it does. Raises UpstreamError if it breaks off."""
        upstream = answer.upstream
        if upstream.has_own_key and answer.status in _KEY_REFUSED and self._call.is_repeatable:
            answer.end()
            message = f"{upstream.title} refuses the credential that the gateway's settings have for it."
            error = UpstreamError(message, code="upstream_credential")
            return Failure(upstream, Retry.ANYWHERE, error, can_repeat=False, is_fault=True)
        if retry := retry_of_status(answer.status):
            wait = retry_after(answer)
            if wait is not None and (upstream.has_own_key or is_fault(answer.status)):  # else it is the client's limit
                upstream.busy_until = self._loop.time() + min(wait, _LONGEST_BUSY)
            if self._call.is_repeatable:
                await _take_error(answer)
            return Failure(
                upstream,
                retry,
                answer=answer,
                retry_after=wait,
                can_repeat=retry is Retry.ANYWHERE,
                is_fault=is_fault(answer.status),
                is_unproven=answer.status == _SERVER_ERROR,
                is_trial=is_trial,
            )
        attempt = answer.attempt
        if answer.status != _OK or not self._call.is_repeatable or attempt is None or attempt.body is None:
            return None
        if answer.content_type in _HTML:
            answer.end()
            page = UpstreamDisconnected(f"{upstream.title} answered with a web page, as a proxy in front of it may do.")
            return Failure(upstream, Retry.ELSEWHERE, page, can_repeat=False, is_fault=True)
        if not attempt.family:
            return None
        missing = await _missing(answer)
        if _ERROR.match(answer.held):
            await _take_error(answer)
            return Failure(
                upstream, Retry.ELSEWHERE, answer=answer, can_repeat=False, is_unproven=True, is_trial=is_trial
            )
        if missing:
            answer.end()
            cut = UpstreamDisconnected(f"{upstream.title} answered with {missing}.")
            return Failure(upstream, Retry.ELSEWHERE, cut, can_repeat=False, is_unproven=True, is_trial=is_trial)
        return None

    def _failure_from(self, upstream: Upstream, error: UpstreamError, seconds: float, is_trial: bool) -> Failure:
        if isinstance(error, DeadlineExceeded | NoUpstream):
            if is_trial:
                upstream.breaker.leave_trial()
            retry = Retry.FREELY if isinstance(error, TooManyRequests) else Retry.NOWHERE
            return Failure(upstream, retry, error, can_repeat=False)
        unreachable = isinstance(error, UpstreamUnreachable)
        upstream.breaker.failed(unreachable=unreachable, is_trial=is_trial)
        if unreachable:
            return Failure(upstream, Retry.FREELY, error, can_repeat=seconds < _QUICK)
        retry = Retry.ELSEWHERE if self._call.is_repeatable else Retry.NOWHERE
        return Failure(upstream, retry, error, can_repeat=False)


def _blame(failures: Sequence[Failure]) -> None:
    """Others have answered with an error of their own what the last one could answer."""
    for failure in failures:
        if failure.is_unproven:
            failure.upstream.breaker.failed(is_trial=failure.is_trial)


def _left_alone(upstream: Upstream) -> Failure:
    seconds = upstream.breaker.remaining
    message = f"{upstream.title} failed again and again and is left alone for {seconds:.1f} s."
    error = NoUpstream(message, retry_after=seconds)
    return Failure(upstream, Retry.FREELY, error, is_left_alone=True, can_repeat=False)


async def _take_error(answer: UpstreamResponse) -> None:
    """Hold the body of an error, and give back its connection. Raises UpstreamError."""
    try:
        async with asyncio.timeout(_ERROR_DEADLINE):
            await answer.peek(_MAX_ERROR_BYTES)
    except TimeoutError as error:
        raise UpstreamDisconnected(f"{answer.upstream.title} did not end its error {answer.status}.") from error
    answer.end()


async def _missing(answer: UpstreamResponse) -> str:
    """Wait for the first bytes of an answer, the first event of a stream, or all of a JSON text that is not long: until
    then another upstream can take over. What it is if it cannot be an answer, else "". Raises UpstreamError.
    """
    if answer.content_type in _STREAMS:
        return await _missing_in_stream(answer)
    is_json = answer.content_type == "application/json"
    is_whole = await answer.hold(_HELD_BYTES if is_json else 0)
    if not answer.held:
        return "nothing"
    return "" if not is_json or not is_whole or _is_json(answer.held) else "what is no JSON"


async def _missing_in_stream(answer: UpstreamResponse) -> str:
    splitter = splitter_of(answer.content_type)
    events: list[bytes] = []
    read, is_whole = 0, False
    while not events and not is_whole and read <= _HELD_BYTES:
        is_whole = await answer.hold(read)
        news = answer.held[read:]
        read += len(news)
        events = splitter.feed(news) or ([splitter.rest] if is_whole else [])
    try:
        for event in events:
            splitter.check(event)
    except NotAnEvent:
        return "something else than events"
    return "" if read else "nothing"


def _is_json(body: bytes) -> bool:
    try:
        _check_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    except RecursionError:
        return True
    return True


def _answer_of(task: asyncio.Task[UpstreamResponse | Failure | None]) -> UpstreamResponse | None:
    if not task.done() or task.cancelled() or task.exception() is not None:
        return None
    given = task.result()
    return given if isinstance(given, UpstreamResponse) else None


async def _first_answer(tasks: Sequence[asyncio.Task[UpstreamResponse | Failure | None]]) -> UpstreamResponse | None:
    """The answer of the first task that ends with one; None if none does."""
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if (answer := _answer_of(task)) is not None:
                return answer
    return None
