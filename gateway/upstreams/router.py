"""Which upstream answers a request."""

import asyncio
import logging
from collections.abc import Mapping

from gateway.errors import NotFound, NoUpstream, UpstreamError, UpstreamUnreachable
from gateway.http.sse import event_json
from gateway.upstreams.upstream import NO_HEADERS, Upstream, UpstreamResponse

log = logging.getLogger(__name__)

_NONE_YET = "No upstream is ready yet; the model may still be loading. Try again shortly."
_REFRESH_SECONDS = 15.0
_REFRESH_DEADLINE = 5.0
_MAX_LISTED_BYTES = 8 * 2**20
_MAX_ERROR_BYTES = 2**20
_REFUSALS = (400, 422)


class Router:
    """Sends a request to the least busy upstream that has its model. Upstreams are added and removed at run time."""

    def __init__(self, *upstreams: Upstream) -> None:
        self._upstreams = list(upstreams)
        self.refreshed = asyncio.Event()
        """Set once every upstream has been asked for its models."""

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        return tuple(self._upstreams)

    @property
    def always_gives_usage(self) -> bool:
        """Whether no upstream has refused to be asked for the usage of a stream."""
        return not any(upstream.refuses_usage for upstream in self._upstreams)

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
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        model: str | None,
        own: Mapping[str, str] = NO_HEADERS,
        with_usage: bytes | None = None,
    ) -> UpstreamResponse:
        """The answer of the first reachable candidate, once it has begun. Raises UpstreamError; if no candidate can be
        reached, it names all of them.

        `headers` and `own` are as for `Upstream.request`. `with_usage` is a body that asks for usage where the client's
        does not; upstreams that have refused it get `body`.
        """
        failures: list[str] = []
        candidates = self.candidates(model)
        for upstream in candidates:
            try:
                if with_usage is None or upstream.refuses_usage:
                    return await upstream.request(method, path, headers, body, own)
                return await _request_with_usage(upstream, method, path, headers, body, own, with_usage)
            except UpstreamUnreachable as error:
                failures.append(error.message)
                if len(failures) < len(candidates):
                    log.warning("%s Trying another upstream.", error)
        raise UpstreamUnreachable(" ".join(failures))

    async def refresh_forever(self) -> None:
        """Refresh the lists of models; runs for as long as the router is used."""
        while True:
            await self.refresh()
            await asyncio.sleep(_REFRESH_SECONDS if self.ready else 1.0)

    async def refresh(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for upstream in self._upstreams:
                tasks.create_task(_fetch_models(upstream))
        self.refreshed.set()


async def _request_with_usage(
    upstream: Upstream,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes | None,
    own: Mapping[str, str],
    with_usage: bytes,
) -> UpstreamResponse:
    """The answer to `with_usage`; to `body` if the upstream refuses to be asked for usage, which is remembered."""
    answer = await upstream.request(method, path, headers, with_usage, own)
    answer.usage_was_added = True
    if answer.status not in _REFUSALS or b"stream_options" not in await answer.peek(_MAX_ERROR_BYTES):
        return answer
    with answer:
        plain = await upstream.request(method, path, headers, body, own)
    # An error that quotes the whole request says nothing about the field.
    upstream.refuses_usage = plain.status == 200
    return plain


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
