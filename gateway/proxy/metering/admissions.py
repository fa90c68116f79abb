"""Holds requests to the limits of their callers: what a hit and a miss count for."""

from collections.abc import Awaitable, Callable

from gateway.errors import Overloaded, TooBusy
from gateway.http.memory_guard import MemoryGuard, memory_limit
from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.metering.accounting import Accounting
from gateway.proxy.metering.estimates import output_tokens, prompt_tokens
from gateway.settings.settings import Settings
from gateway.tenants.admission import UNLIMITED, Admission
from gateway.tenants.caller import Caller
from gateway.tenants.limiter import Limiter
from telemetry.tracing.span import NO_SPAN, Span


class Admissions:
    """Admits requests by the limits of their callers."""

    def __init__(self, limiter: Limiter, accounting: Accounting, settings: Settings) -> None:
        self._limiter = limiter
        self._memory = MemoryGuard(memory_limit(settings.limits.memory, settings.workers))
        self._most = settings.limits.max_requests
        self._under_way = 0
        self._accounting = accounting

    async def hit(self, caller: Caller) -> None:
        """Count a hit, which costs no tokens and no money. Raises RateLimited and CacheUnavailable."""
        if caller.key is not None and self._limiter.take_hit(caller) is not True:
            await self._limiter.admit_hit(caller)

    def miss(self, inference: InferenceRequest, span: Span) -> "AdmittedRequest":
        """The time of a request whose answer is computed, with this span. What it may use is reserved.

        Entering it raises Overloaded, TooBusy, RateLimited, BudgetExceeded and CacheUnavailable.
        """
        return AdmittedRequest(self, lambda: self._reserved(inference), span)

    def other(self, caller: Caller, body: bytes | None, span: Span = NO_SPAN) -> "AdmittedRequest":
        """The time of a request of which the gateway does not learn what it used. Raises what `miss` raises."""
        return AdmittedRequest(self, lambda: self._limiter.admit(caller, prompt_tokens(body or b"", {}), 0, 0.0), span)

    async def _reserved(self, inference: InferenceRequest) -> Admission:
        if inference.caller.key is None:
            return UNLIMITED
        fields = inference.asked.fields
        prompt, output = prompt_tokens(inference.body, fields), output_tokens(fields, inference.choices)
        dollars = self._accounting.estimate(inference, prompt, output)
        return await self._limiter.admit(inference.caller, prompt, output, dollars)

    def begin(self) -> None:
        """Count a request as under way. Raises Overloaded and TooBusy at once if that would be too much."""
        self._shed()
        self._under_way += 1

    def end(self) -> None:
        """It is no longer."""
        self._under_way -= 1

    def _shed(self) -> None:
        if self._memory.overloaded:
            raise Overloaded("The gateway is short of memory; try again.")
        if self._most is not None and self._under_way >= self._most:
            raise TooBusy(f"The gateway has {self._most} requests under way, as many as it may; try again.")


class AdmittedRequest:
    """The time of a request. A class: the frames of generators would take a kilobyte for each open stream."""

    __slots__ = ("_admission", "_admissions", "_admit", "_span")

    def __init__(self, admissions: Admissions, admit: Callable[[], Awaitable[Admission]], span: Span) -> None:
        self._admissions = admissions
        self._admit = admit
        self._span = span
        self._admission = UNLIMITED

    async def __aenter__(self) -> Admission:
        self._admissions.begin()
        try:
            with self._span.span("admission"):
                self._admission = await self._admit()
        except BaseException:
            self._admissions.end()
            raise
        return self._admission

    async def __aexit__(self, *_: object) -> None:
        self._admission.release()
        self._admissions.end()
