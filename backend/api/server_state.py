"""What the handlers of one server share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from backend.api.metrics import Metrics
from backend.engine.async_engine import AsyncEngine, StepReport
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.model import ServedModel
from backend.prefixes.sharing import PrefixSharing
from backend.prefixes.tenants import Tenants
from backend.requests.reader import RequestReader
from prefix_store.codecs.codec import stored_key
from prefix_store.store.open_store import OpenStore

_FORM_THREADS = 2
_MOST_SEQUENCES = 128


class ServerState:
    """The engine and what stands between it and HTTP."""

    def __init__(self, model: ServedModel, engine_config: EngineConfig) -> None:
        self.model = model
        most_sequences = (engine_config.max_batch or model.runner.max_batch) + engine_config.max_waiting
        self.max_seconds = engine_config.max_seconds
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
        )
        self.metrics = Metrics(engine.stats())
        self.engine = AsyncEngine(engine, most_sequences, self._note_step)
        self.public_prefixes = engine_config.public_prefixes
        self.tenants = Tenants()
        """Replaced where the blocks of tenants are kept beyond this process."""
        self.opened_store: OpenStore | None = None
        takes_priority = engine_config.scheduling_policy == "priority"
        self.reader = RequestReader(model, min(most_sequences, _MOST_SEQUENCES), takes_priority)
        # Threads of their own, so that nobody else's request waits for grammars.
        self.form_threads = ThreadPoolExecutor(_FORM_THREADS, thread_name_prefix="form")
        self.created = int(time.time())

    def _note_step(self, report: StepReport) -> None:
        self.metrics.note_step(report)
        self.prefixes.note_step(report)

    @property
    def fingerprint(self) -> str:
        """Says which computation answered, as ``system_fingerprint`` does at OpenAI."""
        return f"keepgate-{self.model.runner.name}"


STATE = web.AppKey("STATE", ServerState)
