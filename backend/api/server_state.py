"""The state that the handlers of one server share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from backend.api.metrics import Metrics
from backend.engine.async_engine import AsyncEngine, StepReport
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.step import Speculator
from backend.model import ServedModel
from backend.prefixes.sharing import PrefixSharing
from backend.requests.reader import RequestReader
from prefix_store.codecs.codec import stored_key
from prefix_store.identity.tenants import Tenants
from prefix_store.store.open_store import OpenStore
from telemetry.tracing.span import Tracing

_GRAMMAR_THREADS = 2
_MAX_SEQUENCES_PER_REQUEST = 128


class ServerState:
    """The model, its engine, and what handlers need to use them."""

    def __init__(
        self, model: ServedModel, engine_config: EngineConfig, tracing: Tracing, speculator: Speculator | None = None
    ) -> None:
        self.model = model
        self.tracing = tracing
        max_in_flight = (engine_config.max_batch or model.runner.max_batch) + engine_config.max_waiting
        self.max_seconds = engine_config.max_seconds
        self.strict_fields = engine_config.strict_fields
        self.prefix_config = engine_config.prefix_store
        lossy = self.prefix_config.lossy_codec if self.prefix_config is not None else None
        self.prefixes = PrefixSharing(lambda command: self.engine.command(command))
        engine = Engine(
            model.runner,
            engine_config.max_batch,
            engine_config.step_tokens,
            engine_config.batching,
            engine_config.shares_prefixes,
            self.prefixes if self.prefix_config is not None else None,
            (lambda key: stored_key(lossy, key)) if lossy is not None else None,
            speculator,
        )
        self.metrics = Metrics(engine.stats())
        self.engine = AsyncEngine(engine, max_in_flight, self._note_step)
        self.public_prefixes = engine_config.public_prefixes
        self.tenants = Tenants(BLOCK_SIZE)
        """Replaced by `open_prefixes` if blocks are stored outside this process."""
        self.opened_store: OpenStore | None = None
        accepts_priority = engine_config.scheduling_policy == "priority"
        max_sequences = min(max_in_flight, _MAX_SEQUENCES_PER_REQUEST)
        self.reader = RequestReader(model, max_sequences, accepts_priority, engine_config.drop_images)
        # A pool of its own, so that only requests with grammars wait for their compilation.
        self.grammar_threads = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="grammar-compiler")
        self.created = int(time.time())

    def _note_step(self, report: StepReport) -> None:
        self.metrics.record_step(report)
        self.prefixes.record_step(report)

    @property
    def fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: which runner computed the answer."""
        return f"keepgate-{self.model.runner.name}"


STATE = web.AppKey("STATE", ServerState)
