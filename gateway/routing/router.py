"""Which upstream answers a request."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from gateway import metrics
from gateway.errors import NotFound, NoUpstream
from gateway.routing.budget import RetryBudget
from gateway.routing.call import RouteCall
from gateway.routing.failures import outcome
from gateway.routing.health import check, fetch_running
from gateway.routing.sending import Sending
from gateway.routing.strategy import RouteRequest, Strategy
from gateway.settings.upstreams import HealthSettings, HedgeSettings, RetrySettings
from gateway.settings.upstreams import Strategy as StrategyName
from gateway.upstreams.upstream import Attempt, Upstream, UpstreamResponse

_NONE_YET = "No upstream is ready yet; the model may still be loading. Try again shortly."
_RECHECK_SECONDS = 1.0
_TOTAL_SECONDS = 3600.0
_OK = 200

StrategyOf = Callable[[str | None], Strategy | None]
"""The strategy for a model; None for the least busy upstream."""
UpstreamsOf = Callable[[str | None], Sequence[str]]
"""The names of the upstreams that a model is restricted to; () for all."""


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """What may change while the router is used. `total` are the seconds for a call that has no deadline."""

    retries: RetrySettings = RetrySettings()  # noqa: RUF009  # frozen
    hedging: HedgeSettings = HedgeSettings()  # noqa: RUF009
    health: HealthSettings = HealthSettings()  # noqa: RUF009
    total: float = _TOTAL_SECONDS
    strategy_of: StrategyOf = lambda model: None
    upstreams_of: UpstreamsOf = lambda model: ()
    is_used: Callable[[StrategyName], bool] = lambda strategy: False
    """Whether some model has the strategy."""


class Router:
    """Sends a request to an upstream that has its model, and to others if that fails. Upstreams are added and removed
    at run time.
    """

    def __init__(
        self,
        *upstreams: Upstream,
        probed: Sequence[str] = (),
        options: RouterOptions = RouterOptions(),  # frozen
    ) -> None:
        """`probed` are endpoints that not every upstream has: each upstream is asked for them before requests need
        them.
        """
        self._upstreams = list(upstreams)
        self._probed = probed
        self.options = options
        self._budget = RetryBudget()
        self._hedge_budget = RetryBudget(least=1)
        self._checked: set[Upstream] = set()
        self._changed = asyncio.Event()
        self.refreshed = asyncio.Event()
        """Set once every upstream has been asked for its models."""
        self.was_ready = asyncio.Event()
        """Set once an upstream can be reached."""

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        return tuple(self._upstreams)

    def none_lacks(self, feature: str) -> bool:
        """Whether no upstream has shown that it lacks what `Attempt.needs` calls so."""
        return not any(feature in upstream.lacks for upstream in self._upstreams)

    def may_have(self, feature: str) -> bool:
        """Whether some upstream is not known to lack it."""
        return not all(feature in upstream.lacks for upstream in self._upstreams)

    @property
    def models(self) -> frozenset[str]:
        """The names of the models that are known."""
        return frozenset().union(*(upstream.models or () for upstream in self._upstreams))

    @property
    def ready(self) -> bool:
        return any(upstream.reachable for upstream in self._upstreams)

    def add(self, upstream: Upstream) -> None:
        self._upstreams.append(upstream)
        self._changed.set()

    def remove(self, upstream: Upstream) -> None:
        self._upstreams.remove(upstream)
        self._changed.set()

    def candidates(self, model: str | None) -> list[Upstream]:
        """Upstreams to try, in order: those that list the model, else all, because some servers accept aliases.

        Those that are well come first; of those, the ones whose models are unknown before the ones that list other
        models. Raises NoUpstream when there is none.
        """
        return self._ordered(model, None, RouteRequest(model or ""))

    def having(self, model: str | None) -> list[Upstream]:
        """Every upstream that lists the model or whose models are unknown; with None all.

        Raises NoUpstream when there is none at all, and NotFound when none has the model.
        """
        having = [u for u in self._allowed(model) if model is None or u.models is None or model in u.models]
        if not self._upstreams:
            raise NoUpstream(_NONE_YET)
        if not having:
            raise NotFound(f"No upstream has the model {model!r}; GET /v1/models lists those there are.", param="model")
        return having

    async def request(self, call: RouteCall) -> UpstreamResponse:
        """The answer to a call, once it has begun; `UpstreamResponse.model` says which model it is of.

        Until then it is sent again, to others and after pauses, as the settings allow. Where every try fails, the last
        answer that an upstream gave is returned, an error. Raises UpstreamError if there was none, and names all
        failures.
        """
        now = asyncio.get_running_loop().time()
        options = self.options
        deadline = now + options.total if call.deadline is None else min(call.deadline, now + options.total)
        self._budget.count(now)
        self._hedge_budget.count(now)
        sending = Sending(
            call, deadline, options.retries, options.hedging, self._budget, self._hedge_budget, self._probed
        )
        answer = await self._send(sending, call.model, call.attempts, call)
        if answer is not None:
            return answer
        of_first = len(sending.failures)
        for model, attempts in call.fallbacks:
            answer = await self._send(sending, model, attempts, call)
            if answer is not None and answer.status == _OK:
                metrics.fallbacks.inc()
                return answer
            if answer is not None:  # an error of a model that the client has not named says nothing to it
                answer.end()
        if sending.absent is not None and not sending.failures:
            raise sending.absent
        answer = outcome(sending.failures, of_first, sending.lacks, call.otherwise)
        answer.model = call.model
        return answer

    async def _send(
        self, sending: Sending, model: str | None, attempts: Sequence[Attempt], call: RouteCall
    ) -> UpstreamResponse | None:
        """The answer of an upstream of this model, if one gives one."""
        strategy = self.options.strategy_of(model)
        asked = RouteRequest(model or "", call.blocks, call.held)

        def candidates() -> list[Upstream]:
            try:
                return self._ordered(model, strategy, asked)
            except NoUpstream as error:
                sending.absent = error
                return []

        answer = await sending.to(candidates, attempts, strategy, asked)
        if answer is not None:
            answer.model = model
        return answer

    def _ordered(self, model: str | None, strategy: Strategy | None, asked: RouteRequest) -> list[Upstream]:
        if not self._upstreams:
            raise NoUpstream(_NONE_YET)
        allowed = self._allowed(model)
        usable = [u for u in allowed if model is not None and u.models is not None and model in u.models] or allowed
        if len(usable) == 1:
            return list(usable) if strategy is None else strategy.order(usable, asked)
        now = usable[0].loop.time()

        def rank(upstream: Upstream) -> tuple[bool, bool, bool, float]:
            """Lower ones are asked first, whatever the strategy."""
            return (
                not upstream.is_well or upstream.breaker.state == "open",
                now < upstream.busy_until,
                model is not None and upstream.models is not None,
                upstream.slots.waiting / (upstream.slots.limit or 1) + upstream.slots.is_full,
            )

        if strategy is None:
            return sorted(usable, key=lambda upstream: (*rank(upstream), upstream.in_flight))
        ordered: list[Upstream] = []
        for _, group in groupby(sorted(usable, key=rank), rank):
            equal = list(group)
            ordered += strategy.order(equal, asked)
        return ordered

    def _allowed(self, model: str | None) -> Sequence[Upstream]:
        """Raises NoUpstream where the settings restrict the model to upstreams that are not there."""
        names = self.options.upstreams_of(model)
        if not names:
            return self._upstreams
        allowed = [upstream for upstream in self._upstreams if upstream.name in names]
        if not allowed:
            raise NoUpstream(f"None of the upstreams of {model!r} is there: {', '.join(names)}.")
        return allowed

    async def check_forever(self) -> None:
        """Check every upstream again and again, each on its own; runs for as long as the router is used."""
        async with asyncio.TaskGroup() as tasks:
            checking: dict[Upstream, asyncio.Task[None]] = {}
            while True:
                self._changed.clear()
                for upstream in [upstream for upstream in checking if upstream not in self._upstreams]:
                    checking.pop(upstream).cancel()
                for upstream in self._upstreams:
                    if upstream not in checking:
                        checking[upstream] = tasks.create_task(self._keep_checking(upstream))
                self._note_checked()
                await self._changed.wait()

    async def refresh(self) -> None:
        """Check every upstream now."""
        async with asyncio.TaskGroup() as tasks:
            for upstream in self._upstreams:
                tasks.create_task(self._check(upstream))
        self._note_checked()

    async def _keep_checking(self, upstream: Upstream) -> None:
        while True:
            is_known = await self._check(upstream) or upstream.models is not None
            interval = self.options.health.interval
            is_settled = upstream.state == "up" and is_known
            await asyncio.sleep(interval if is_settled else min(interval, _RECHECK_SECONDS))

    async def _check(self, upstream: Upstream) -> bool:
        """Returns whether it answered when it was asked for its models."""
        has_answered = await check(upstream, self.options.health.deadline, self._probed)
        if self.options.is_used("model-aware"):
            await fetch_running(upstream, self.options.health.deadline)
        self._checked.add(upstream)
        self._note_checked()
        return has_answered

    def _note_checked(self) -> None:
        if self.ready:
            self.was_ready.set()
        self._checked.intersection_update(self._upstreams)
        if self._checked.issuperset(self._upstreams):
            self.refreshed.set()
