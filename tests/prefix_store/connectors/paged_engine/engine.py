"""A small paged engine, whose scheduler drives the connector as vLLM's (v1/core/sched/scheduler.py, 0.32) does.

Continuous batching, chunked prefill, a prefix cache of its own, preemption, one or two steps under way. Block 0 is
null.
"""

from __future__ import annotations

import enum
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prefix_store.connectors.lookup_sockets import LookupClient
from prefix_store.connectors.scheduler import SchedulerSide
from prefix_store.connectors.transfers import NO_NAMESPACE
from prefix_store.frames.block_id import BlockId
from prefix_store.identity.tenants import Tenants
from prefix_store.store.chain import Chain
from prefix_store.store.config import StoreConfig
from tests.prefix_store.connectors.paged_engine.toy_model import BLOCK, STOP, answer_of
from tests.prefix_store.connectors.paged_engine.workers import Memory, Output, Rank, Step, Workers

SECRET = "one secret of all engines"
_TOKEN_SECONDS = 0.002
"""What computing a token takes by the engine's clock, which is ahead of the real one by that."""


class Status(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request, with the attributes of vLLM's that the connector reads."""

    request_id: str
    prompt: list[int]
    max_tokens: int = 2
    cache_salt: str | None = None
    lora_request: Any = None
    prompt_embeds: Any = None
    mm_features: Sequence[Any] = ()

    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    """Blocks that others may share."""
    placeholders: int = 0
    """Tokens that are being sampled."""
    stale: int = 0
    """Tokens of steps under way from before a preemption."""
    drops_stale: bool = False
    is_known: bool = False
    """Whether the workers have its tokens."""
    last_step: int = 0
    loaded: int = 0
    """Tokens that the connector has announced."""
    shared: int = 0
    """Tokens of the engine's own prefix cache."""
    preemptions: int = 0
    is_aborted: bool = False

    def __post_init__(self) -> None:
        self._tokens = list(self.prompt)
        self.all_token_ids: Sequence[int] = self._tokens
        self.num_prompt_tokens = len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def answer(self) -> list[int]:
        """Its tokens until now."""
        return self._tokens[self.num_prompt_tokens :]

    def append(self, token: int) -> None:
        """The next token of the answer."""
        self._tokens.append(token)


class BlockPool:
    """The engine's blocks: reference counts, and which of them can be shared by what is in them."""

    def __init__(self, count: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))
        self._users = [0] * count
        self._keys: dict[int, Any] = {}
        self._by_key: dict[Any, int] = {}
        self.taken_new: set[int] = set()
        """Since it was last emptied, of blocks whose content is void."""

    def find(self, key: Any) -> int | None:
        """The block with this content."""
        return self._by_key.get(key)

    def share(self, key: Any, block: int) -> None:
        """Lets others find a block."""
        if key not in self._by_key and block not in self._keys:
            self._by_key[key], self._keys[block] = block, key

    def is_shared(self, block: int) -> bool:
        """Whether others may find it, also while it is free."""
        return block in self._keys

    def unshare_all(self) -> None:
        """Nothing is found any more."""
        self._keys.clear()
        self._by_key.clear()

    def use(self, block: int) -> None:
        """One more user of a block that was found."""
        self.free.pop(block, None)
        self._users[block] += 1

    def take(self) -> int:
        """A free block, to be filled."""
        block, _ = self.free.popitem(last=False)
        assert self._users[block] == 0
        self._users[block] = 1
        if (key := self._keys.pop(block, None)) is not None:
            del self._by_key[key]
        self.taken_new.add(block)
        return block

    def release(self, block: int) -> None:
        """One user less."""
        assert block
        assert self._users[block] > 0, f"block {block} was freed twice"
        self._users[block] -= 1
        if not self._users[block]:
            self.free[block] = None


@dataclass(frozen=True)
class Setup:
    """An engine's settings."""

    store: StoreConfig
    blocks: int = 64
    ranks: int = 1
    depth: int = 1
    """Steps under way."""
    shares: bool = True
    """Whether the engine has a prefix cache of its own."""
    step_tokens: int = 32
    most_running: int = 8
    memory: Memory = "one"
    loads: bool = True
    saves: bool = True
    audit_every: int = 0
    asks_ahead: bool = False
    """Whether workers are asked through sockets, ahead of the steps."""
    seed: int = 1
    """Of the model."""
    claimed_seed: int | None = None
    """Of the model that the store takes it for; None: its own."""


class PagedEngine:
    """The scheduler, with its workers.

    Args:
        choose: whether a step is executed at once, or only when its result is wanted.
    """

    def __init__(self, setup: Setup, choose: Callable[[], bool] = lambda: True) -> None:
        self.setup = setup
        self.requests: dict[str, Request] = {}
        self.done: list[Request] = []
        self.pool = BlockPool(setup.blocks)
        self.planned_saves = 0
        """Blocks that the workers were told to save."""
        self.loads = self.audits = 0
        self._ahead = 0.0
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._preempted: set[str] = set()
        self._has_ended = False
        self._admits = True
        """Whether the next step takes waiting requests: not after a preemption."""
        self._number = self._processed = 0
        self._deferred: deque[tuple[int, list[int]]] = deque()
        self._was_free = set(self.pool.free)
        self._choose = choose
        self._under_way: deque[tuple[Step, Output | None]] = deque()
        tenants = Tenants(BLOCK, bytes(16), SECRET.encode())
        self.tenants = tenants
        self.side = SchedulerSide(
            BLOCK,
            tenants,
            workers=setup.ranks,
            loads=setup.loads,
            saves=setup.saves,
            audit_every=setup.audit_every,
            lookup_client=LookupClient(setup.ranks) if setup.asks_ahead else None,
            clock=self.clock,
        )
        claimed = setup.seed if setup.claimed_seed is None else setup.claimed_seed
        ranks = [Rank(rank, setup.store, setup.blocks, claimed, setup.memory) for rank in range(setup.ranks)]
        self.workers = Workers(ranks, setup.seed)

    def clock(self) -> float:
        """Seconds."""
        return time.monotonic() + self._ahead

    def pass_seconds(self, seconds: float) -> None:
        """Puts the clock forward."""
        self._ahead += seconds

    def close(self) -> None:
        """Ends the workers."""
        for rank in self.workers.ranks:
            rank.side.close()
        self.side.close()

    # What clients and operators do

    def add(self, request: Request) -> Request:
        """A new request."""
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self.side.arrived(request)
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request, if it is not over."""
        request = self.requests.get(request_id)
        if request is not None and request.status is not Status.FINISHED:
            request.is_aborted = True
            self._finish(request)

    def reset(self, preempts: bool = False, forgets: bool = True) -> None:
        """vLLM's reset_prefix_cache."""
        while preempts and self._running:
            self._preempt(self._running.pop(), drops_stale=True)
        self.pool.unshare_all()
        if forgets:
            self.side.forget_all()

    def preempt(self) -> None:
        """The next step needs the blocks of the last running request, as if others had grown."""
        if self._running and self._may_free(self._running[-1]):
            self._preempt(self._running.pop(), drops_stale=False)
            self._admits = False

    def ask(self, prompt: list[int], **named: Any) -> Request:
        """A request alone, to its end."""
        number = len(self.done) + len(self.requests)
        request = self.add(Request(f"asked-{number}", prompt, **named))
        self.run()
        assert request.is_aborted or request.answer == answer_of(self.setup.seed, prompt, request.max_tokens)
        return request

    def chain(self, tokens: list[int], salt: str | None = None) -> list[BlockId]:
        """The blocks of a prompt as the scheduler's side names them."""
        keys = self.tenants.keys([f"cache_salt:{salt}"] if salt else [])
        chain = Chain(NO_NAMESPACE, keys.root, BLOCK)
        full = tokens[: len(tokens) // BLOCK * BLOCK]
        chain.extend(keys.keys_of(full), full)
        return chain.blocks

    def run(self, steps: int = 5_000, seconds: float = 40.0) -> None:
        """Steps until nothing is left to do. Raises AssertionError if that does not come."""
        deadline = time.monotonic() + seconds
        while self.has_work:
            assert steps, f"these wait for ever: {self._states()}"
            assert time.monotonic() < deadline, f"these wait for ever: {self._states()}"
            steps -= 1
            self.step()
        assert len(self.pool.free) == self.setup.blocks - 1, "blocks were not freed"

    @property
    def has_work(self) -> bool:
        """Whether vLLM would step."""
        return bool(self.requests or self._under_way or self._has_ended)

    # Steps

    def step(self) -> None:
        """Begins a step, ends one."""
        if self.requests or self._has_ended:
            step = self._schedule()
            self._under_way.append((step, None))
            if self._choose():
                self._execute()
            if len(self._under_way) < self.setup.depth and (step.scheduled or self.requests):
                return
        if self._under_way:
            self._execute(1)
            step, output = self._under_way.popleft()
            assert output is not None
            self._ahead += _TOKEN_SECONDS * sum(step.scheduled.values())
            self._update(step, output)

    def _execute(self, most: int = 2) -> None:
        """The workers take steps in order."""
        for place, (step, output) in enumerate(list(self._under_way)[:most]):
            if output is None:
                self._under_way[place] = step, self.workers.execute(step)

    def _schedule(self) -> Step:
        scheduled: dict[str, int] = {}
        starts: dict[str, int] = {}
        fresh: dict[str, list[int]] = {}
        budget = self.setup.step_tokens
        admits, self._admits = self._admits, True

        def begin(request: Request, count: int) -> None:
            nonlocal budget
            budget -= count
            scheduled[request.request_id], starts[request.request_id] = count, request.num_computed_tokens
            if not request.is_known:
                request.is_known = True
                fresh[request.request_id] = list(request.all_token_ids)

        for request in list(self._running):
            count = min(request.num_tokens + request.placeholders - request.num_computed_tokens, budget)
            is_last = request.num_computed_tokens + 2 - request.placeholders >= len(request.prompt) + request.max_tokens
            if request not in self._running or count <= 0 or (request.placeholders and is_last):
                continue
            while not (is_allocated := self._allocate(request, request.num_computed_tokens + count)):
                victim = self._running[-1]
                if not self._may_free(victim):
                    break
                self._preempt(self._running.pop(), drops_stale=False)
                admits = False
                if victim is request:
                    break
            if not is_allocated:
                break
            begin(request, count)
        # Stable: those that hold blocks come first.
        for request in sorted(self._waiting, key=lambda request: not request.blocks):
            if not admits or budget <= 0 or len(self._running) >= self.setup.most_running:
                break
            if request.status is Status.LOADING:
                if request.request_id not in self._received:
                    continue
                self._end_load(request)
            if request.stale and not request.drops_stale:
                continue
            hits, external = [], 0
            computed = request.num_computed_tokens
            if not computed:
                hits = self._hits(request)
                matched = self.side.matched_tokens(request, len(hits) * BLOCK)
                if matched is None:
                    continue
                external = matched
                computed = len(hits) * BLOCK + external
                assert computed < request.num_tokens
                assert computed % BLOCK == 0
            count = 0 if external else min(request.num_tokens - computed, budget)
            if not self._allocate(request, computed + count, hits, is_load=bool(external)):
                break
            request.num_computed_tokens = computed
            request.shared += len(hits) * BLOCK
            request.loaded += external
            if external:
                self.loads += 1
                self.side.allocated(request, request.blocks, external)
                request.status = Status.LOADING
                continue
            self._waiting.remove(request)
            self._running.append(request)
            request.status = Status.RUNNING
            begin(request, count)
        plan = self.side.build_plan(scheduled, self._preempted, lambda request_id: self.requests[request_id].blocks)
        self.planned_saves += sum(len(save.block_ids) for save in plan.saves) * self.setup.ranks
        self.audits += len(plan.audits)
        self._number += bool(scheduled)
        sampled = set()
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            request.last_step = self._number
            self._share(request)
            if request.num_computed_tokens == request.num_tokens + request.placeholders:
                request.placeholders += 1
                sampled.add(request_id)
        self._preempted, self._has_ended = set(), False
        is_free = set(self.pool.free)
        tables = {request_id: list(self.requests[request_id].blocks) for request_id in scheduled}
        freed = {block: self.pool.is_shared(block) for block in is_free - self._was_free}
        new, self.pool.taken_new = self.pool.taken_new, set()
        # A block that was taken and became free again is void, too.
        step = Step(
            *(plan, self._number, scheduled, starts, tables, fresh, sampled, new, self._was_free - is_free, freed)
        )
        self._was_free = is_free
        return step

    def _update(self, step: Step, output: Output) -> None:
        if step.scheduled:
            self._processed += 1
            while self._deferred and self._deferred[0][0] <= self._processed:
                self._release(self._deferred.popleft()[1])
        if output.failed_blocks:
            self._note_failed(output.failed_blocks)
        for request_id, count in step.scheduled.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_in_flight_tokens -= count
            is_stale = request.stale > 0
            request.stale -= count if is_stale else 0
            assert request.stale >= 0
            if request.status is Status.FINISHED or (is_stale and request.drops_stale):
                continue
            if request_id in step.sampled:
                request.append(output.tokens[request_id])
                if not is_stale:
                    request.placeholders -= 1
                    self._share(request)
                if request.all_token_ids[-1] == STOP or len(request.answer) >= request.max_tokens:
                    self._finish(request)
        self.side.step_ended(output.report, output.received)
        for request_id in output.received:
            request = self.requests[request_id]
            if request.status is Status.LOADING:
                self._received.add(request_id)
            else:
                assert request.status is Status.FINISHED
                self._free(request)
        for request_id in output.sent:
            assert self.requests[request_id].status is Status.FINISHED
            self._free(self.requests[request_id])

    # Loads

    def _note_failed(self, failed: set[int]) -> None:
        owners = {block: request for request in self.requests.values() for block in request.blocks}
        for block in failed:
            owner = owners.get(block)
            assert owner is not None, f"block {block} was reported as not loaded after it was freed"
            assert owner.status in (Status.LOADING, Status.FINISHED), f"block {block} is of {owner.status}"
        for request in self._waiting:
            if request.status is Status.LOADING:
                whole = -(-request.num_computed_tokens // BLOCK)
                first = next((place for place in range(whole) if request.blocks[place] in failed), None)
                if first is not None:
                    request.num_computed_tokens = first * BLOCK
                    self._failed.add(request.request_id)

    def _end_load(self, request: Request) -> None:
        self._received.remove(request.request_id)
        if request.request_id in self._failed and not request.num_computed_tokens:
            self._free_blocks(request)
        self._failed.discard(request.request_id)
        request.status = Status.WAITING
        self._share(request)
        assert request.num_computed_tokens < request.num_tokens

    # Blocks

    def _keys(self, request: Request, until: int) -> Iterator[Any]:
        for end in range(BLOCK, until + 1, BLOCK):
            yield request.cache_salt, tuple(request.all_token_ids[:end])

    def _hits(self, request: Request) -> list[int]:
        """Leading blocks that the engine itself has; the last token is always computed."""
        hits: list[int] = []
        for key in self._keys(request, request.num_tokens - 1 if self.setup.shares else 0):
            if (block := self.pool.find(key)) is None:
                break
            hits.append(block)
        return hits

    def _share(self, request: Request) -> None:
        if self.setup.shares and request.status is not Status.LOADING:
            full = min(request.num_computed_tokens, request.num_tokens) // BLOCK
            for place, key in enumerate(self._keys(request, full * BLOCK)):
                if place >= request.cached:
                    self.pool.share(key, request.blocks[place])
            request.cached = max(request.cached, full)

    def _allocate(self, request: Request, tokens: int, hits: list[int] | None = None, is_load: bool = False) -> bool:
        wanted = -(-tokens // BLOCK) - len(request.blocks) - len(hits or [])
        free = len(self.pool.free) - sum(block in self.pool.free for block in hits or [])
        # A load holds its blocks while nothing can take them back: prompts under way keep what they will need.
        if is_load:
            under_way = [
                other for other in self.requests.values() if other.blocks and other.status is not Status.FINISHED
            ]
            free -= sum(self._missing(other) for other in under_way)
        if max(wanted, self._missing(request) - len(hits or []) if is_load else 0) > free:
            return False
        for block in hits or []:
            self.pool.use(block)
        request.blocks += [*(hits or []), *(self.pool.take() for _ in range(wanted))]
        request.cached = max(request.cached, len(hits or []))
        return True

    def _missing(self, request: Request) -> int:
        """Blocks that a request has not for its tokens."""
        return max(0, -(-request.num_tokens // BLOCK) - len(request.blocks))

    def _may_free(self, request: Request) -> bool:
        """Whether no step under way writes its blocks, which a load might write, too."""
        return self.setup.depth == 1 or not self.setup.loads or request.last_step <= self._processed

    def _free_blocks(self, request: Request) -> None:
        blocks, request.blocks = request.blocks, []
        request.cached = 0
        if self._may_free(request):
            self._release(blocks)
        elif blocks:
            self._deferred.append((self._number, blocks))

    def _release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.pool.release(block)

    def _preempt(self, request: Request, drops_stale: bool) -> None:
        self._free_blocks(request)
        request.status = Status.WAITING
        request.num_computed_tokens = request.placeholders = 0
        request.drops_stale = drops_stale or (request.drops_stale and request.stale > 0)
        request.stale = request.num_in_flight_tokens
        request.is_known = False
        request.preemptions += 1
        self._waiting.insert(0, request)
        self._preempted.add(request.request_id)

    def _finish(self, request: Request) -> None:
        is_loading = request.status is Status.LOADING and request.request_id not in self._received
        self._received.discard(request.request_id)
        self._failed.discard(request.request_id)
        for queue in (self._running, self._waiting):
            if request in queue:
                queue.remove(request)
        request.status = Status.FINISHED
        computed = max(0, -(-request.num_computed_tokens // BLOCK))
        is_held = self.side.finished(request, request.blocks[:computed])
        self._has_ended = True
        if not (is_held or is_loading):
            self._free(request)

    def _free(self, request: Request) -> None:
        self._free_blocks(request)
        del self.requests[request.request_id]
        self.done.append(request)

    def _states(self) -> list[str]:
        return [f"{request.request_id} {request.status.value}" for request in self.requests.values()]


@contextmanager
def paged_engine(setup: Setup, choose: random.Random | None = None) -> Iterator[PagedEngine]:
    """An engine; at its end nothing has written free blocks."""
    engine = PagedEngine(setup, (lambda: choose.random() < 0.5) if choose is not None else lambda: True)
    try:
        yield engine
    finally:
        engine.close()
    for rank in engine.workers.ranks:
        rank.check_free_blocks()
