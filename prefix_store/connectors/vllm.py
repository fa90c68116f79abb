"""The KV connector for vLLM. In its command line:

    --kv-transfer-config '{"kv_connector": "KeepgateConnector", "kv_connector_module_path":
    "prefix_store.connectors.vllm", "kv_role": "kv_both", "kv_connector_extra_config": {"memory": "8GiB"}}'

vLLM makes one for its scheduler and one for each worker. This class speaks vLLM's interface; what is done is in
scheduler.py and worker.py. No method raises once the engine runs: whatever fails, blocks are computed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from prefix_store.connectors.http_api import StoreApi, serving, token_blocks
from prefix_store.connectors.kv_memory import kv_memory
from prefix_store.connectors.lookup_sockets import LookupClient
from prefix_store.connectors.options import listening, read_options
from prefix_store.connectors.public_prefixes import publish
from prefix_store.connectors.scheduler import SchedulerSide
from prefix_store.connectors.store_thread import StoreThread
from prefix_store.connectors.transfers import PartNames, StepPlan, StepReport
from prefix_store.connectors.vllm_statistics import (
    StorePromMetrics,
    StoreReporter,
    StoreStats,
    scheduler_metrics,
    worker_metrics,
)
from prefix_store.connectors.vllm_support import check_codecs, check_setup, check_version, fingerprint_of
from prefix_store.connectors.worker import WorkerSide
from prefix_store.identity.tenants import Tenants
from prefix_store.store.description import describe_store
from prefix_store.store.open_store import OpenStore, open_store

log = logging.getLogger(__name__)

_ROOT = bytes(16)
"""Keys are made without the model: each worker mixes in what its part of it is."""

F = TypeVar("F", bound=Callable[..., Any])


def _contained(default: Any = None) -> Callable[[F], F]:
    """A fault in a method is logged, and vLLM gets a default: an exception would end its engine."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def contained(*arguments: Any, **named: Any) -> Any:
            try:
                return method(*arguments, **named)
            except Exception:
                log.exception("%s failed; prompts are computed", method.__name__)
                return default() if callable(default) else default

        return contained  # type: ignore[return-value]

    return decorate


def _lookup_client(workers: int) -> LookupClient | None:
    try:
        return LookupClient(workers)
    except OSError as error:
        log.info("look-ups go with the engine's steps alone: %s", error)
        return None


def _log_like_vllm() -> None:
    """Logs with vLLM's handlers: it configures no logger but its own."""
    own, theirs = logging.getLogger("prefix_store"), logging.getLogger("vllm")
    if not own.handlers and not logging.getLogger().handlers:
        own.handlers, own.propagate = list(theirs.handlers), False
        own.setLevel(theirs.level)


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The plan of a step."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The report of a step."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        """The reports of two workers as one."""
        return WorkerMetadata(self.report.and_of(other.report))


class KeepgateConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Keeps the KV blocks of prompts in Keepgate's prefix store.

    Raises:
        ValueError: an option is not valid, or the model or this vLLM is not supported; the message names it.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        check_version(vllm.__version__)
        check_setup(vllm_config, kv_cache_config)
        options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        self._options = options
        self._block_size: int = vllm_config.cache_config.block_size
        config = options.config(self._worker_number)
        check_codecs(config)
        self._tenants = Tenants(self._block_size, _ROOT, config.secret.encode() or None)
        publish(options.public_prefix, vllm_config.model_config, self._tenants.published)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._reporter: StoreReporter | None = None
        self._store_config = config
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._block_size,
                self._tenants,
                workers=vllm_config.parallel_config.world_size,
                loads=self._kv_transfer_config.is_kv_consumer,
                saves=self._kv_transfer_config.is_kv_producer,
                audit_every=options.audit,
                lookup_client=_lookup_client(vllm_config.parallel_config.world_size),
            )
            self._reporter = StoreReporter(functools.partial(scheduler_metrics, self._scheduler))

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is computed again."""
        return False

    @property
    def _rank(self) -> int:
        """Of this worker among those that have a part of each block."""
        return int(self._vllm_config.parallel_config.rank)

    @property
    def _worker_number(self) -> int:
        """Of this worker among those of the server on this host: data-parallel engines have their workers in turn."""
        parallel = self._vllm_config.parallel_config
        return int(parallel.data_parallel_rank_local or 0) * int(parallel.world_size) + self._rank

    # Workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens the store. Raises ValueError or OSError: the engine does not start without it."""
        num_blocks = self._kv_cache_config.num_blocks
        memory = kv_memory(kv_caches, num_blocks)
        names: list[PartNames] = []
        opens = functools.partial(self._open, memory.layout, names)
        thread: StoreThread[OpenStore] = StoreThread(opens)
        self._worker = WorkerSide(memory, num_blocks, thread, names[0])
        metrics = functools.partial(worker_metrics, self._worker, self._block_size)
        self._reporter = StoreReporter(metrics, str(self._worker_number))
        log.info(
            "the prefix store of worker %d keeps blocks of %d tokens and %d bytes in %s",
            *(self._worker_number, self._block_size, thread.value.block_bytes, ", ".join(thread.value.store.tiers)),
        )

    @asynccontextmanager
    async def _open(self, layout: Any, names: list[PartNames]) -> AsyncIterator[OpenStore]:
        """The store of this worker's part, and its HTTP interface."""
        fingerprint = await fingerprint_of(
            self._vllm_config, vllm.__version__, self._attention_kernels(), layout, self._rank
        )
        namespace = fingerprint.digest
        names.append(PartNames(namespace))
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(open_store(self._store_config, namespace, layout))
            if (at := listening(self._options, self._worker_number)) is not None:
                blocks_of = token_blocks(self._block_size, self._tenants, names[0])
                api = StoreApi(opened, self._block_size, blocks_of, lambda: self._state(opened))
                await stack.enter_async_context(serving(api.application(), at))
            yield opened

    def _attention_kernels(self) -> Iterable[str]:
        """The backends of the attention layers, and what they have chosen of their kernels."""
        for layer in self._vllm_config.compilation_config.static_forward_context.values():
            if (backend := getattr(layer, "attn_backend", None)) is not None:
                yield f"{backend.get_name()} {getattr(layer, 'isa', '')}".strip()

    def _state(self, opened: OpenStore) -> dict[str, Any]:
        """For operators."""
        worker = self._worker
        described = describe_store(opened, self._block_size, None if worker is None else worker.block_seconds)
        audits = None if worker is None else worker.audits()
        return {**described, "engine": f"vllm {vllm.__version__}", "worker": self._worker_number, "audits": audits}

    @_contained()
    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Before a step: blocks of preempted requests may be overwritten when this returns."""
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """Before a step: begins look-ups."""
        super().bind_connector_metadata(connector_metadata)
        self._begin(connector_metadata.plan)

    @_contained()
    def _begin(self, plan: StepPlan) -> None:
        if self._worker is not None:
            self._worker.begin(plan)

    @_contained()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins loads, which go on while the engine computes."""
        if self._worker is not None:
            self._worker.load(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests wait for their loads in the scheduler, not in a layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved when they are full, all layers at once."""

    @_contained()
    def wait_for_save(self) -> None:
        """After a step: begins saves; waits for nothing."""
        if self._worker is not None and self.has_connector_metadata():
            self._worker.save(self._get_connector_metadata().plan)

    @_contained(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """After a step: the requests whose saves, and whose loads, have ended."""
        if self._worker is None:
            return None, None
        is_idle = self.has_connector_metadata() and self._get_connector_metadata().plan.is_idle
        sent, received = self._worker.collect(is_idle)
        return sent or None, received or None

    @_contained(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were to be loaded and are to be computed."""
        return set() if self._worker is None else self._worker.failed_blocks()

    @_contained()
    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """After a step: answers to look-ups."""
        return None if self._worker is None else WorkerMetadata(self._worker.report())

    @_contained()
    def get_kv_connector_stats(self) -> StoreStats | None:
        """What has changed since the last step."""
        return None if self._reporter is None else self._reporter.changes()

    def shutdown(self) -> None:
        """Closes the store."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.close()

    # The scheduler

    @_contained()
    def on_new_request(self, request: Any) -> None:
        """Asks where a new request's blocks are."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    @_contained(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens are to be loaded; None: ask again."""
        if self._scheduler is None:
            return 0, False
        matched = self._scheduler.matched_tokens(request, num_computed_tokens)
        return matched, bool(matched)

    @_contained()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were allocated, also for what is to be loaded."""
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The plan of the step that begins."""
        return self._built(scheduler_output) or StepMetadata(StepPlan())

    @_contained()
    def _built(self, scheduler_output: Any) -> StepMetadata | None:
        if self._scheduler is None:
            return None
        state = scheduler_output.kv_connector_block_state

        def block_ids(request_id: str) -> list[int]:
            ids: tuple[list[int], ...] = state.get_block_ids(request_id)
            return ids[0]

        scheduled, preempted = scheduler_output.num_scheduled_tokens, scheduler_output.preempted_req_ids
        return StepMetadata(self._scheduler.build_plan(scheduled, preempted or (), block_ids))

    @_contained()
    def update_connector_output(self, connector_output: Any) -> None:
        """Takes the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(meta, WorkerMetadata):
            self._scheduler.step_ended(meta.report, connector_output.finished_recving or ())

    @_contained(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must stay until its saves have ended."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.finished(request, block_ids), None

    @_contained(lambda: False)
    def reset_cache(self) -> bool | None:
        """The weights have changed: what is stored is not found again."""
        if self._scheduler is None:
            return False
        self._scheduler.forget_all()
        return True

    # Metrics, in the process of the API server

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats:
        """Statistics as a worker has sent them."""
        return StoreStats(data=data) if data else StoreStats(data={"counters": {}, "gauges": {}})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> StorePromMetrics:
        """What vLLM's ``/metrics`` shows of it."""
        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
