"""Faults of upstreams: of one, which no request may notice, and of all, after which only what is stored is answered."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tests.chaos.fault import Fault
from tests.chaos.stage import Stage
from tests.chaos.upstream import BEHAVIOURS

# What is told of upstreams that do not answer, beside errors of their own.
_NOBODY_LEFT = frozenset({502, 503, 504})
_OWN = {
    "answer 429": frozenset({429}),
    "answer 429 without Retry-After": frozenset({429}),
    "answer 500": frozenset({500}),
}
# So long that breakers have opened and been tried; so long that calls to it end, and others have been asked.
_SHOWS_AFTER, _HANGS_FOR = 0.6, 2.0
_HANGING = frozenset({"hang before the first byte", "hang after the first byte"})
# All that have not worked on a request are asked again after pauses, which take most of what a hasty client has.
_ASKED_AGAIN = frozenset({"refuse", "answer 429", "answer 429 without Retry-After", "answer 503"})
# These end streams that have begun.
_WITHIN_STREAMS = frozenset({"refuse", "hang after the first byte", "cut the stream"})


def _holding(behaviour: str, *, all_of_them: bool) -> Callable[[Stage], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def hold(stage: Stage) -> AsyncIterator[None]:
        upstreams = stage.upstreams if all_of_them else [stage.one]
        await asyncio.gather(*(upstream.behave(behaviour) for upstream in upstreams))
        try:
            yield
        finally:
            await asyncio.gather(*(upstream.behave("well") for upstream in upstreams))

    return hold


@asynccontextmanager
async def _killed(stage: Stage) -> AsyncIterator[None]:
    await stage.one.kill()
    try:
        yield
    finally:
        await stage.one.start()


@asynccontextmanager
async def _frozen(stage: Stage) -> AsyncIterator[None]:
    stage.one.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        stage.one.process.send_signal(signal.SIGCONT)


FAULTS = (
    *(
        Fault(
            f"one upstream: {behaviour}",
            _holding(behaviour, all_of_them=False),
            told=behaviour in _WITHIN_STREAMS,
            hangs=behaviour in _HANGING,
            least=_HANGS_FOR if behaviour in _HANGING else _SHOWS_AFTER,
        )
        for behaviour in BEHAVIOURS[1:]
    ),
    Fault("one upstream: killed", _killed, told=True),
    Fault("one upstream: frozen", _frozen, told=True, hangs=True, least=_HANGS_FOR),
    *(
        Fault(
            f"all upstreams: {behaviour}",
            _holding(behaviour, all_of_them=True),
            refused=_NOBODY_LEFT | _OWN.get(behaviour, frozenset()),
            told=behaviour in _WITHIN_STREAMS,
            hangs=behaviour in _HANGING | _ASKED_AGAIN,
            least=_HANGS_FOR if behaviour in _HANGING else _SHOWS_AFTER,
        )
        for behaviour in BEHAVIOURS[1:]
    ),
)
