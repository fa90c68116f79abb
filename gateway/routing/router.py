"""Which upstream answers a request."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from gateway.errors import GatewayError, NotFound, NoUpstream, UpstreamError, UpstreamUnreachable
from gateway.http.sse import event_json
from gateway.upstreams.upstream import NO_HEADERS, Attempt, Upstream, UpstreamResponse

log = logging.getLogger(__name__)

_NONE_YET = "No upstream is ready yet; the model may still be loading. Try again shortly."
_REFRESH_SECONDS = 15.0
_REFRESH_DEADLINE = 5.0
_MAX_LISTED_BYTES = 8 * 2**20
_MAX_ERROR_BYTES = 2**20
_OK = 200
# What servers answer to a field or a path that they do not know.
_LACKING = frozenset({400, 404, 405, 422, 501})


class Router:
    """Sends a request to the least busy upstream that has its model. Upstreams are added and removed at run time."""

    def __init__(self, *upstreams: Upstream, probed: Sequence[str] = ()) -> None:
        """`probed` are endpoints that not every upstream has: each upstream is asked for them before requests need
        them.
        """
        self._upstreams = list(upstreams)
        self._probed = probed
        self.refreshed = asyncio.Event()
        """Set once every upstream has been asked for its models."""

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

    def remove(self, upstream: Upstream) -> None:
        self._upstreams.remove(upstream)

    def candidates(self, model: str | None) -> list[Upstream]:
        """Upstreams to try, in order: those that list the model, else all, because some servers accept aliases.

        Reachable ones come first; of those, the ones whose models are unknown before the ones that list other models.
        Raises NoUpstream when there is none.
        """
        if not self._upstreams:
            raise NoUpstream(_NONE_YET)
        listing = [u for u in self._upstreams if model is not None and u.models is not None and model in u.models]
        return sorted(
            listing or self._upstreams,
            key=lambda u: (not u.reachable, model is not None and u.models is not None, u.in_flight),
        )

    def having(self, model: str | None) -> list[Upstream]:
        """Every upstream that lists the model or whose models are unknown; with None all.

        Raises NoUpstream when there is none at all, and NotFound when none has the model.
        """
        having = [u for u in self._upstreams if model is None or u.models is None or model in u.models]
        if not self._upstreams:
            raise NoUpstream(_NONE_YET)
        if not having:
            raise NotFound(f"No upstream has the model {model!r}; GET /v1/models lists those there are.", param="model")
        return having

    async def request(
        self,
        method: str,
        headers: Mapping[str, str],
        attempts: Sequence[Attempt],
        otherwise: GatewayError | None,
        model: str | None,
        own: Mapping[str, str] = NO_HEADERS,
    ) -> UpstreamResponse:
        """The answer of the first reachable candidate, once it has begun. Raises UpstreamError; if no candidate can be
        reached, it names all of them.

        `headers` and `own` are as for `Upstream.request`. Of the `attempts`, an upstream gets the first of which it is
        not known to lack something. `otherwise` is raised where no candidate has what any attempt needs; None if the
        last one needs nothing.
        """
        failures: list[str] = []
        candidates = self.candidates(model)
        for upstream in candidates:
            possible = [a for a in attempts if a.needs not in upstream.lacks and a.mark not in upstream.lacks]
            try:
                # The error of an endpoint that is not known to be lacking may be about something else in the request.
                keeps_error = bool(possible) and possible[-1].needs in self._probed
                if answer := await _first_possible(upstream, method, headers, possible, own, keeps_error):
                    return answer
            except UpstreamUnreachable as error:
                failures.append(error.message)
                if len(failures) < len(candidates):
                    log.warning("%s Trying another upstream.", error)
        raise (
            otherwise
            if otherwise is not None and len(failures) < len(candidates)
            else UpstreamUnreachable(" ".join(failures))
        )

    async def refresh_forever(self) -> None:
        """Refresh the lists of models; runs for as long as the router is used."""
        while True:
            await self.refresh()
            await asyncio.sleep(_REFRESH_SECONDS if self.ready else 1.0)

    async def refresh(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for upstream in self._upstreams:
                tasks.create_task(self._inspect(upstream))
        self.refreshed.set()

    async def _inspect(self, upstream: Upstream) -> None:
        await _fetch_models(upstream)
        if upstream.reachable and not upstream.probed:
            upstream.probed = True
            upstream.lacks.intersection_update(self._probed)
            await asyncio.gather(*(_probe(upstream, path) for path in self._probed))


async def _probe(upstream: Upstream, path: str) -> None:
    """Note that the upstream lacks an endpoint. One that has it refuses an empty request, and computes nothing."""
    try:
        async with asyncio.timeout(_REFRESH_DEADLINE):
            with await upstream.request("POST", path, {"Content-Type": "application/json"}, b"{}") as answer:
                is_lacking = answer.status in (404, 405, 501)
                (upstream.lacks.add if is_lacking else upstream.lacks.discard)(path)
                # Other statuses, such as 401, may say nothing of the path.
                (upstream.has.add if answer.status in (400, 422) else upstream.has.discard)(path)
    except (UpstreamError, TimeoutError) as error:
        log.debug("%s: %s: %s", upstream.name, path, error)


async def _first_possible(
    upstream: Upstream,
    method: str,
    headers: Mapping[str, str],
    attempts: Sequence[Attempt],
    own: Mapping[str, str],
    keeps_error: bool,
) -> UpstreamResponse | None:
    """The answer to the first attempt for which the upstream has what it needs. What it lacks is remembered.

    With `keeps_error` the answer to the last attempt is given, whatever it says.
    """
    lacking: list[str] = []
    for attempt in attempts:
        if attempt.needs in lacking or attempt.mark in lacking:
            continue
        answer = await _send(upstream, method, headers, attempt, own)
        with contextlib.ExitStack() as ending:
            ending.enter_context(answer)
            is_kept = keeps_error and attempt is attempts[-1]
            if not is_kept and (missing := await _missing(answer, attempt)):
                lacking.append(missing)
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
    if answer.status not in _LACKING or (attempt.lacking is None and not attempt.mark):
        return ""
    error = await answer.peek(_MAX_ERROR_BYTES)
    if attempt.mark and attempt.mark.encode() in error:
        return attempt.mark
    return attempt.needs if attempt.lacking is not None and attempt.lacking(answer.status, error) else ""


async def _send(
    upstream: Upstream, method: str, headers: Mapping[str, str], attempt: Attempt, own: Mapping[str, str]
) -> UpstreamResponse:
    answer = await upstream.request(
        method, attempt.path, headers, attempt.body, {**own, **attempt.own}, attempt.dropped
    )
    answer.attempt = attempt
    return answer


async def _fetch_models(upstream: Upstream) -> None:
    try:
        async with asyncio.timeout(_REFRESH_DEADLINE):
            with await upstream.request("GET", "/v1/models", {}, None) as answer:
                body = await answer.body(_MAX_LISTED_BYTES)
            if answer.status != 200:
                return
            listed = event_json(body).get("data")
            if isinstance(listed, list):
                names = (item.get("id") for item in listed if isinstance(item, dict))
                upstream.models = frozenset(name for name in names if isinstance(name, str))
    except (UpstreamError, TimeoutError, ValueError) as error:
        log.debug("%s: models unknown: %s", upstream.name, error)
