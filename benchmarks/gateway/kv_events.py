"""Routing by the KV cache events of four engines, whose caches are simulated and whose events are real.

As a program it prints the figures as JSON: `python -m benchmarks.gateway.kv_events`.
"""

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Semaphore
from typing import Any

import msgspec
import zmq

from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import run_on_subject_core
from gateway.commands.route import coarse, simulated
from gateway.commands.route_simulation import Outcome, Speed, simulate
from gateway.http.background_tasks import background_tasks
from gateway.routing.prefixes.asking import Asker, Prompt
from gateway.routing.prefixes.event_sources import EventSource
from gateway.routing.prefixes.history import PrefixHistory
from gateway.routing.prefixes.kv_events import EngineBlocks
from gateway.routing.prefixes.kv_subscription import Subscription
from gateway.routing.prefixes.views import PublishedBlocks
from gateway.routing.strategies.prefix_aware import PrefixAware
from gateway.routing.strategy import C, Candidate, RouteRequest
from gateway.settings.settings import TimeoutSettings
from gateway.settings.upstreams import RoutingSettings, UpstreamSettings
from gateway.upstreams.connection import ConnectionPool, open_connections
from gateway.upstreams.upstream import Upstream
from prefix_store.eviction.access import Access
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.tree import BlockTree
from prefix_store.replay.read import read_trace
from prefix_store.replay.trace import Trace, TraceRequest

_TRACE = Path(__file__).resolve().parents[1] / "data" / "traces" / "mooncake_conversation.jsonl.gz"
_UPSTREAMS, _BLOCKS = 4, 20_000
_QUICK_REQUESTS = 1_000
_BLOCK_TOKENS = 2
_MASK = 2**32 - 1
_PROMPT_BLOCKS, _TIMES = 128, 500
_METHOD = """\
The Mooncake conversation trace as in the figure of routing: four engines with caches for 20,000 blocks together (LRU)
that compute 12,000 tokens a second. The caches are simulated. What they store and evict is published as vLLM does, over
ZeroMQ, once the simulated engine has computed the prompt; the gateway's own subscription, view and strategy take it.
Scaled down, a block has two tokens in place of 512. With `events` the strategy knows these only, with `history` only
what it has sent. Imbalance is the most of any upstream, in means of all: of requests, or of tokens that were computed.
The times are CPU time on one core: of the gateway for a block that is stored and evicted, and to look up a prompt of
128 blocks that four upstreams hold."""

_pack = msgspec.msgpack.Encoder().encode


class Found(msgspec.Struct):
    """What a way to route did with the trace."""

    hits: float
    requests: float
    computed: float
    median: float
    slow: float


class Measured(msgspec.Struct):
    """All that the program prints; times in microseconds."""

    outcomes: dict[str, Found]
    block: float
    lookup: float


async def measure(quick: bool) -> Figure:
    words = ["--quick"] if quick else []
    found = msgspec.json.decode(await run_on_subject_core("benchmarks.gateway.kv_events", *words), type=Measured)
    turns, events = found.outcomes["round-robin"], found.outcomes["events"]
    rows = [
        Row(
            what="block hits by events, against round robin",
            unit=RATIO,
            rounds=(events.hits / turns.hits,),
            target=None if quick else Target("least", 2.0),
        ),
        *(row for name, each in found.outcomes.items() for row in _rows(name, each, name == "events" and not quick)),
        Row(what="a block stored and evicted", unit="µs", rounds=(found.block,)),
        Row(what="what four upstreams hold of 128 blocks", unit="µs", rounds=(found.lookup,)),
    ]
    return Figure(figure="kv_events", title="Routing by KV cache events", method=_METHOD, rows=tuple(rows))


def _rows(name: str, found: Found, is_wanted: bool) -> Sequence[Row]:
    return (
        Row(
            what=f"{name}: block hits",
            unit="%",
            rounds=(found.hits,),
            beside=({"first token p50 s": found.median, "first token p99 s": found.slow},),
        ),
        Row(
            what=f"{name}: imbalance",
            unit="means",
            rounds=(max(found.requests, found.computed),),
            target=Target("most", 1.3) if is_wanted else None,
            beside=({"requests": found.requests, "computed tokens": found.computed},),
        ),
    )


class TakenBlocks(EngineBlocks):
    """What the gateway knows of an engine. `taken` counts the batches of events that it has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = Semaphore(0)

    def apply(self, batch: bytes) -> None:
        super().apply(batch)
        self.taken.release()


class Engine:
    """The KV cache of a simulated engine, which publishes what it stores and evicts."""

    def __init__(self, socket: "zmq.Socket[bytes]", blocks: TakenBlocks, capacity: int) -> None:
        self._socket = socket
        self._blocks = blocks
        self._tree: BlockTree[int] = BlockTree(capacity, LeastRecentlyUsed(), remembered=0.0)
        self._number = 0
        self._free_at = 0.0
        self._due: deque[tuple[float, list[dict[str, Any]]]] = deque()

    def use(self, keys: Sequence[int], time: float) -> int:
        """As `Cache.use`; the events follow when the prompt is computed."""
        leading = self._tree.lookup(keys)
        evicted = self._tree.use(keys, Access(time))
        self._free_at = max(time, self._free_at) + (len(keys) - leading) * 512 / Speed().prefill
        kept = self._tree.lookup(keys)
        events = [_removed(evicted)] if evicted else []
        if kept > leading:
            events.append(_stored(keys[leading:kept], keys[leading - 1] if leading else None))
        if events:
            self._due.append((self._free_at, events))
        return leading

    def publish(self, now: float) -> None:
        """Send all events that are due, and wait until the gateway has taken them."""
        while self._due and self._due[0][0] <= now:
            _, events = self._due.popleft()
            self._socket.send_multipart([b"", self._number.to_bytes(8, "big"), _pack([now, events])])
            self._number += 1
            self._blocks.taken.acquire()


class ByEvents:
    """A strategy that is told what upstreams hold, as the gateway tells it."""

    def __init__(self, strategy: PrefixAware, held: Callable[[Sequence[int]], Mapping[str, float]]) -> None:
        self._strategy = strategy
        self._held = held

    def order(self, candidates: Sequence[C], request: RouteRequest) -> list[C]:
        self._asked = replace(request, held=self._held(request.blocks))
        return self._strategy.order(candidates, self._asked)

    def sent(self, candidate: Candidate, request: RouteRequest) -> None:
        self._strategy.sent(candidate, self._asked)


async def _by_events(trace: Trace) -> Outcome:
    """What `prefix-aware` does with the trace, by what the engines publish."""
    names = [f"upstream {number}" for number in range(_UPSTREAMS)]
    async with AsyncExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        pool = await stack.enter_async_context(open_connections(5.0))
        tasks = await stack.enter_async_context(background_tasks())
        engines: list[Engine] = []
        known: dict[str, TakenBlocks] = {}
        for name in names:
            socket = stack.enter_context(context.socket(zmq.XPUB))
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            subscription = Subscription(EventSource(f"tcp://127.0.0.1:{port}", None))
            subscription.blocks = known[name] = TakenBlocks()
            tasks.start(subscription.follow())
            await asyncio.to_thread(socket.recv)  # it has subscribed
            engines.append(Engine(socket, known[name], _BLOCKS // _UPSTREAMS))
        upstreams = [_upstream(name, pool) for name in names]
        view, loop = PublishedBlocks(Asker(1.0), known), asyncio.get_running_loop()

        def held(blocks: Sequence[int]) -> Mapping[str, float]:
            shares = view.shares(upstreams, Prompt({"prompt": _tokens(blocks)}))
            return asyncio.run_coroutine_threadsafe(shares, loop).result()

        def arrivals() -> Iterator[TraceRequest]:
            for request in trace.requests():
                for engine in engines:
                    engine.publish(request.time)
                yield request

        bound = RoutingSettings().load_bound
        strategy = ByEvents(PrefixAware(PrefixHistory(1), bound), held)
        return await asyncio.to_thread(simulate, arrivals(), trace.block_tokens, strategy, engines)


def _upstream(name: str, pool: ConnectionPool) -> Upstream:
    url = "http://127.0.0.1:1/v1"  # prompts are tokens: none is asked for them
    return Upstream(url, pool, TimeoutSettings(), settings=UpstreamSettings(url=url, name=name))


def _stored(keys: Sequence[int], parent: int | None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": keys,
        "parent_block_hash": parent,
        "token_ids": _tokens(keys),
        "block_size": _BLOCK_TOKENS,
        "medium": "GPU",
    }


def _removed(keys: Sequence[int]) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": keys, "medium": "GPU"}


def _tokens(keys: Sequence[int]) -> list[int]:
    return [token for key in keys for token in (key & _MASK, key >> 32 & _MASK)]


def _measured(quick: bool) -> Measured:
    trace = coarse(read_trace(_TRACE))
    if quick:
        first = list(islice(trace.requests(), _QUICK_REQUESTS))
        trace = Trace(trace.style, trace.block_tokens, len(first), lambda: iter(first))
    routing = RoutingSettings(prefix_blocks=_BLOCKS)
    outcomes = {
        "round-robin": simulated(trace, "round-robin", routing, _UPSTREAMS, _BLOCKS),
        "events": asyncio.run(_by_events(trace)),
        "history": simulated(trace, "prefix-aware", routing, _UPSTREAMS, _BLOCKS),
    }
    found = {
        name: Found(100 * each.block_hits, each.requests, each.computed, *each.first_token)
        for name, each in outcomes.items()
    }
    return Measured(found, _block_time(), _lookup_time())


def _block_time() -> float:
    """Of a prompt's blocks that are stored in one event and evicted in another."""
    blocks, keys = EngineBlocks(), list(range(_PROMPT_BLOCKS))
    batches = [_pack([1.0, [event]]) for event in (_stored(keys, None), _removed(keys))]
    began = time.process_time()
    for _ in range(_TIMES):
        for batch in batches:
            blocks.apply(batch)
    return (time.process_time() - began) / _TIMES / _PROMPT_BLOCKS * 1e6


def _lookup_time() -> float:
    blocks, keys = EngineBlocks(), list(range(_PROMPT_BLOCKS))
    blocks.apply(_pack([1.0, [_stored(keys, None)]]))
    tokens = _tokens(keys)
    began = time.process_time()
    for _ in range(_TIMES):
        for _ in range(_UPSTREAMS):
            blocks.leading(tokens)
    return (time.process_time() - began) / _TIMES * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    sys.stdout.buffer.write(msgspec.json.encode(_measured(parser.parse_args().quick)))


if __name__ == "__main__":
    main()
