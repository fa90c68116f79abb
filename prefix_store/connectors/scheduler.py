"""The side of a connector that lives with the engine's scheduler: which blocks of which request are loaded and saved.

arrived ─► look-up ─► matched_tokens ─► allocated ─► load │ build_plan ─► saves │ finished ─► last save
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prefix_store.connectors.lookup_sockets import LookupClient
from prefix_store.connectors.transfers import (
    NO_NAMESPACE,
    Audit,
    Found,
    Load,
    Lookup,
    Save,
    StepPlan,
    StepReport,
)
from prefix_store.identity.keys import KeyChain
from prefix_store.identity.tenants import Tenants
from prefix_store.store.chain import Chain
from prefix_store.store.prefill_rate import PrefillRate

log = logging.getLogger(__name__)

_LOOKUP_SECONDS = 2.0
"""An answer that takes longer is not waited for. Workers answer within .5 s, at the end of a step."""
_AHEAD_SECONDS = 0.005
"""So long a step waits for workers that were asked ahead of it, if they answered the last time."""


class EngineRequest(Protocol):
    """What is read of an engine's request."""

    request_id: str
    cache_salt: str | None
    lora_request: Any
    prompt_embeds: Any
    mm_features: Sequence[Any]
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_prompt_tokens: int
    all_token_ids: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the answer until now."""


@dataclass(slots=True)
class _Tracked:
    request: EngineRequest
    keys: KeyChain
    chain: Chain
    limit: int
    """So many leading tokens are told by their ids alone."""
    known: int = 0
    """Blocks that the workers have been told of."""
    lookup: int = 0
    """The number of its last look-up."""
    asked_at: float | None = None
    """When the step with it began."""
    asked_ahead_at: float | None = None
    found: Found | None = None
    in_engine: int = 0
    """Blocks that the engine itself had at the last question."""
    was_loaded: bool = False
    """Whether its prefix has been loaded, or tried to: once is enough."""
    loading_until: int = 0
    """Blocks up to which it is being loaded; 0: it is not."""
    saved: int = 0
    """Blocks that are stored, or handed over to be."""
    has_saves: bool = False
    is_audited: bool = False
    is_void: bool = False
    """Whether its blocks are of weights that the engine has no longer, or follow from such."""


class SchedulerSide:
    """Decides for all workers of one engine, in the scheduler's thread.

    It waits for nothing but, for some milliseconds, the answer to a look-up that it asked ahead.

    Args:
        block_size: tokens in a block of the engine.
        tenants: keys by the requests' salts.
        workers: how many have a part of each block.
        loads: whether stored blocks are loaded.
        saves: whether computed blocks are stored.
        audit_every: one in so many prefixes that could be loaded is computed, and compared; 0: none.
        lookup_client: asks the workers ahead of the steps; None: they are asked with the steps alone.
        clock: seconds.
    """

    def __init__(
        self,
        block_size: int,
        tenants: Tenants,
        workers: int = 1,
        loads: bool = True,
        saves: bool = True,
        audit_every: int = 0,
        lookup_client: LookupClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rate = PrefillRate(block_size)
        self.bypassed: Counter[str] = Counter()
        """Requests whose blocks are not told by their tokens, by the reason."""
        self.late = 0
        """Look-ups that were not answered in time."""
        self._block_size = block_size
        self._tenants = tenants
        self._workers = workers
        self._loads, self._saves = loads, saves
        self._audit_every = audit_every
        self._restorable = 0
        self._clock = clock
        self._requests: dict[str, _Tracked] = {}
        self._left_alone: set[str] = set()
        self._lookups = 0
        self._partial: dict[str, Found] = {}
        """Answers of some of the workers, with steps."""
        self._lookup_client = lookup_client
        self._partial_ahead: dict[str, Found] = {}
        self._is_in_time = True
        """Whether the workers' last answer came in the time that a step waits."""
        self._plan = StepPlan()
        self._step = 0
        self._steps: dict[int, tuple[float, int, int]] = {}
        """Under way, by number: when they began, with how many tokens, how many of them of prompts."""
        self._last_end = 0.0

    def arrived(self, request: EngineRequest) -> None:
        """A new request: asks where its blocks are, while it waits in the queue."""
        if request.request_id not in self._requests and (tracked := self._track(request)) is not None:
            self._ask(tracked)
            # Before workers have other names, blocks must not be found by the old ones.
            may_ask = tracked.found is None and not self._plan.starts_epoch
            if may_ask and self._lookup_client is not None and self._lookup_client.ask(self._plan.lookups[-1]):
                tracked.asked_ahead_at = time.monotonic()

    def matched_tokens(self, request: EngineRequest, computed: int) -> int | None:
        """How many tokens after the first ``computed`` are to be loaded; None: that is not known yet."""
        self.arrived(request)
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.was_loaded or not self._loads:
            return 0
        if tracked.found is None and self._lookup_client is not None and tracked.asked_ahead_at is not None:
            self._take_answers(self._lookup_client, tracked, tracked.asked_ahead_at + _AHEAD_SECONDS)
        if tracked.found is None:
            if tracked.asked_at is None or self._clock() - tracked.asked_at <= _LOOKUP_SECONDS:
                return None
            self.late += 1
            tracked.found = Found()
        tracked.in_engine = computed // self._block_size
        if tracked.is_audited:
            return 0
        # The last token is always computed: its logits are wanted.
        until = min(tracked.found.until, (request.num_tokens - 1) // self._block_size)
        return max(0, until - tracked.in_engine) * self._block_size

    def allocated(self, request: EngineRequest, block_ids: Sequence[int], tokens: int) -> None:
        """The engine has allocated blocks for ``tokens`` tokens that are to be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not tokens:
            return
        first = tracked.in_engine
        until = first + tokens // self._block_size
        tracked.was_loaded, tracked.loading_until = True, until
        self._plan.loads.append(Load(request.request_id, first, tuple(block_ids[first:until])))

    def build_plan(
        self,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        block_ids: Callable[[str], Sequence[int]],
    ) -> StepPlan:
        """What the workers do with the step that begins.

        Args:
            scheduled: tokens of the step, by request.
            preempted: requests whose blocks are free since the last step.
            block_ids: the blocks of a scheduled request.
        """
        for request_id in preempted:
            self._plan.preempted.append(request_id)
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.was_loaded = tracked.has_saves = False
                self._ask(tracked)
        rows = prompt_rows = 0
        for request_id, count in scheduled.items():
            rows += count
            if (tracked := self._requests.get(request_id)) is not None:
                if tracked.request.num_computed_tokens < tracked.request.num_prompt_tokens:
                    prompt_rows += count
                self._save(tracked, lambda request_id=request_id: block_ids(request_id))  # type: ignore[misc]
            elif count > 1:
                prompt_rows += count
        now = self._clock()
        plan, self._plan = self._plan, StepPlan()
        for lookup in plan.lookups:
            if (tracked := self._requests.get(lookup.request_id)) is not None:
                tracked.asked_at = now
        plan.is_idle = not rows
        plan.lookup_address = b"" if self._lookup_client is None else self._lookup_client.address
        plan.block_seconds = self.rate.block_seconds
        self._step = plan.step = self._step + 1
        if rows:
            self._steps[self._step] = now, rows, prompt_rows
        return plan

    def step_ended(self, report: StepReport, loaded: Iterable[str]) -> None:
        """Takes the workers' report of a step, and the requests whose loads have ended, well or not."""
        now = self._clock()
        for step in [step for step in self._steps if step <= report.step]:
            began, rows, prompt_rows = self._steps.pop(step)
            if step == report.step:  # with two steps under way, the second begins when the first ends
                self.rate.note(rows, prompt_rows, now - max(began, self._last_end))
        self._last_end = now
        for request_id in loaded:
            if (tracked := self._requests.get(request_id)) is not None:
                computed = tracked.request.num_computed_tokens // self._block_size
                if computed < tracked.loading_until:  # the rest has failed: it is stored again
                    tracked.saved = min(tracked.saved, computed)
                tracked.loading_until = 0
        for request_id, answer in report.found.items():
            self._answered(request_id, answer, self._partial)

    def finished(self, request: EngineRequest, block_ids: Sequence[int]) -> bool:
        """A request is over. Returns whether its blocks must stay until the workers report the end of its saves."""
        tracked = self._requests.pop(request.request_id, None)
        self._left_alone.discard(request.request_id)
        self._forget_answers(request.request_id)
        if tracked is None:
            return False
        answer = max(0, request.num_tokens - request.num_prompt_tokens)
        if tracked.loading_until:
            self._plan.aborted.append(request.request_id)
            self._plan.ended[request.request_id] = False, answer
            return False
        if tracked.found is None:  # without loads no request waits for the answer
            tracked.found = Found()
        self._save(tracked, lambda: block_ids)
        if tracked.is_audited and tracked.found is not None:
            first = tracked.in_engine
            until = min(tracked.found.until, self._computed(request) // self._block_size)
            if first < until:
                self._plan.audits.append(Audit(request.request_id, first, tuple(block_ids[first:until])))
                tracked.has_saves = True
        self._plan.ended[request.request_id] = tracked.has_saves, answer
        return tracked.has_saves

    def forget_all(self) -> None:
        """What is stored is of other weights than those that the engine has now."""
        self._plan.starts_epoch = True
        for tracked in self._requests.values():
            if tracked.request.num_computed_tokens:
                tracked.found, tracked.was_loaded, tracked.is_void = Found(), True, True
            else:
                self._ask(tracked)

    def close(self) -> None:
        """Asks no more ahead."""
        if self._lookup_client is not None:
            self._lookup_client.close()
            self._lookup_client = None

    def _track(self, request: EngineRequest) -> _Tracked | None:
        """None: nothing of it can be told by its tokens."""
        reason = (
            "lora" if request.lora_request is not None else "prompt_embeds" if request.prompt_embeds is not None else ""
        )
        limit = min([2**62, *(feature.mm_position.offset for feature in request.mm_features)])
        if not reason and limit < self._block_size:
            reason = "multimodal"
        if reason:
            # Asked about again and again while it waits, it counts once.
            self.bypassed[reason] += request.request_id not in self._left_alone
            self._left_alone.add(request.request_id)
            return None
        salts = [f"cache_salt:{request.cache_salt}"] if request.cache_salt else []
        keys = self._tenants.keys(salts)
        chain = Chain(NO_NAMESPACE, keys.root, self._block_size)
        tracked = self._requests[request.request_id] = _Tracked(request, keys, chain, limit)
        return tracked

    def _ask(self, tracked: _Tracked) -> None:
        self._forget_answers(tracked.request.request_id)
        self._lookups += 1
        tracked.lookup = self._lookups
        tracked.saved, tracked.is_void = 0, False
        try:
            self._extend(tracked, min(tracked.limit, tracked.request.num_tokens) // self._block_size)
        except Exception:
            log.exception("request %s has no keys; its prompt is computed and not stored", tracked.request.request_id)
            tracked.is_void = True
        tracked.known = len(tracked.chain.blocks)
        # Without blocks there is nothing to wait for, but the workers must know the request: its answer may fill some.
        tracked.found = None if tracked.chain.blocks else Found()
        tracked.asked_at = tracked.asked_ahead_at = None
        self._plan.lookups.append(Lookup(tracked.request.request_id, tracked.lookup, tuple(tracked.chain.blocks)))

    def _take_answers(self, client: LookupClient, tracked: _Tracked, until: float) -> None:
        """Takes answers of workers that were asked ahead; waits for this request's."""
        while tracked.found is None:
            answers = list(client.answers(max(0.0, until - time.monotonic()) if self._is_in_time else 0.0))
            for request_id, answer in answers:
                self._answered(request_id, answer, self._partial_ahead)
            if not answers:
                break
        self._is_in_time = tracked.found is not None

    def _forget_answers(self, request_id: str) -> None:
        self._partial.pop(request_id, None)
        self._partial_ahead.pop(request_id, None)

    def _answered(self, request_id: str, answer: Found, partial: dict[str, Found]) -> None:
        """Takes an answer; ``partial`` has those of other workers that came the same way."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.found is not None or answer.number != tracked.lookup:
            return
        if request_id in partial:
            answer = partial.pop(request_id).and_of(answer)
        if answer.workers < self._workers:
            partial[request_id] = answer
            return
        tracked.found, tracked.saved = answer, answer.kept
        if answer.until and self._audit_every:
            self._restorable += 1
            tracked.is_audited = self._restorable % self._audit_every == 0

    def _computed(self, request: EngineRequest) -> int:
        """Leading tokens whose keys and values are in the engine's blocks, and whose ids are known."""
        return min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)

    def _save(self, tracked: _Tracked, block_ids: Callable[[], Sequence[int]]) -> None:
        """Has the workers store what is full since the last time."""
        if not self._saves or tracked.is_void or tracked.found is None or tracked.loading_until:
            return
        try:
            self._save_full(tracked, block_ids)
        except Exception:
            log.exception("blocks of request %s are not stored", tracked.request.request_id)
            tracked.is_void = True

    def _save_full(self, tracked: _Tracked, block_ids: Callable[[], Sequence[int]]) -> None:
        first = tracked.saved
        full = min(self._computed(tracked.request), tracked.limit) // self._block_size
        if full <= first:
            return
        self._extend(tracked, full)
        save = Save(
            tracked.request.request_id,
            tuple(tracked.chain.blocks[tracked.known :]),
            first,
            tuple(block_ids()[first:full]),
        )
        tracked.known, tracked.saved, tracked.has_saves = len(tracked.chain.blocks), full, True
        self._plan.saves.append(save)

    def _extend(self, tracked: _Tracked, count: int) -> None:
        """Extends a chain to so many blocks."""
        size, blocks = self._block_size, tracked.chain.blocks
        first = len(blocks)
        if count <= first:
            return
        ids = np.asarray(tracked.request.all_token_ids[first * size : count * size], dtype=np.int32)
        if not first:
            keys = tracked.keys.keys_of(ids)
        else:
            keys, parent = [], blocks[-1].key
            for start in range(0, len(ids), size):
                parent = tracked.keys.next_key(parent, ids[start : start + size])
                keys.append(parent)
        tracked.chain.extend(keys, ids)
