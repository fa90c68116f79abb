"""What the handlers of one server share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from backend.async_engine import AsyncEngine
from backend.config import EngineConfig
from backend.engine import Engine
from backend.metrics import Metrics
from backend.model import ServedModel
from backend.requests import RequestReader

_FORM_THREADS = 2
_MOST_SEQUENCES = 128


class ServerState:
    """The engine and what stands between it and HTTP."""

    def __init__(self, model: ServedModel, engine_config: EngineConfig) -> None:
        self.model = model
        most_sequences = (engine_config.max_batch or model.runner.max_batch) + engine_config.max_waiting
        self.max_seconds = engine_config.max_seconds
        engine = Engine(
            model.runner,
            engine_config.max_batch,
            engine_config.step_tokens,
            engine_config.batching,
            engine_config.shares_prefixes,
        )
        self.metrics = Metrics(engine.stats())
        self.engine = AsyncEngine(engine, most_sequences, self.metrics.note_step)
        takes_priority = engine_config.scheduling_policy == "priority"
        self.reader = RequestReader(model, min(most_sequences, _MOST_SEQUENCES), takes_priority)
        # Threads of their own, so that nobody else's request waits for grammars.
        self.form_threads = ThreadPoolExecutor(_FORM_THREADS, thread_name_prefix="form")
        self.created = int(time.time())

    @property
    def fingerprint(self) -> str:
        """Says which computation answered, as ``system_fingerprint`` does at OpenAI."""
        return f"keepgate-{self.model.runner.name}"


STATE = web.AppKey("STATE", ServerState)
