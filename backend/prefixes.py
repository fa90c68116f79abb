"""The prefix store of one server: opened with it, and closed with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from backend.config import EngineConfig
from backend.errors import ModelError
from backend.fingerprint import fingerprint_of
from backend.model import ServedModel
from backend.server_state import ServerState
from backend.tenants import Tenants
from prefix_store.identity.keys import root_key
from prefix_store.store.open_store import open_store


def why_not(model: ServedModel, engine: EngineConfig) -> str | None:
    """Why the model's blocks cannot be kept beyond the engine's memory; None: they can."""
    if model.runner.kv_blocks is None:
        return f"{model.runner.name} does not let its KV memory be read"
    if model.runner.config.sight is not None:
        return "no layer of this model sees the whole context, so the beginnings of its prompts are soon of no use"
    return None if engine.shares_prefixes else "--no-prefix-sharing"


@asynccontextmanager
async def open_prefixes(state: ServerState) -> AsyncIterator[None]:
    """Keeps the blocks of a server's prompts beyond its engine's memory, where it is configured to.

    Raises:
        ModelError: they cannot be kept as they are to be.
    """
    config, kv_blocks = state.prefix_config, state.model.runner.kv_blocks
    if config is None or kv_blocks is None:
        yield
        return
    namespace = (await fingerprint_of(state.model, kv_blocks.layout)).digest
    state.tenants = Tenants(root_key(namespace), config.secret.encode() or None)
    async with AsyncExitStack() as stack:
        try:
            opened = await stack.enter_async_context(open_store(config, namespace, kv_blocks.layout))
        except (ValueError, OSError) as error:
            raise ModelError(f"the prefix store cannot be opened: {error}") from error
        state.store = opened
        await stack.enter_async_context(state.prefixes.over(opened.store, namespace, state.engine.engine))
        yield
