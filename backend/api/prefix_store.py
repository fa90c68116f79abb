"""The prefix store of one server: opened with it, and closed with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from backend.api.server_state import ServerState
from backend.engine.async_engine import NOT_RUNNING
from backend.engine.kv_connector import StoredPrefix
from backend.engine.model_runner import BLOCK_SIZE
from backend.errors import ModelError, PrefixStoreError, Unavailable
from backend.model import ServedModel
from backend.prefixes.audit import PrefixAuditor
from backend.prefixes.fingerprint import fingerprint_of
from backend.prefixes.public_prefixes import publish
from prefix_store.identity.keys import root_key
from prefix_store.identity.tenants import Tenants
from prefix_store.store.open_store import open_store
from prefix_store.store.store import PrefixStore

_ENGINE_SECONDS = 60.0
_SETTLE_SECONDS = 5.0


def unsupported_reason(model: ServedModel) -> str | None:
    """Why the model's blocks cannot be kept beyond the engine's memory; None: they can."""
    if model.runner.kv_blocks is None:
        return f"{model.runner.name} does not let its KV memory be read"
    if model.runner.config.attention_window is not None:
        return "no layer of this model sees the whole context, so the beginnings of its prompts are soon of no use"
    return None


@asynccontextmanager
async def open_prefixes(state: ServerState) -> AsyncIterator[None]:
    """Keeps the blocks of a server's prompts beyond its engine's memory, where it is configured to.

    Raises:
        ModelError: they cannot be kept as they are to be, or a public prefix cannot be read.
    """
    config = state.prefix_config
    # On a device this takes memory, so it is only asked for where it is used.
    kv_blocks = state.model.runner.kv_blocks if config is not None else None
    if config is None or kv_blocks is None:
        publish(state.public_prefixes, state.reader.tokens, state.tenants.published)
        yield
        return
    namespace = (await fingerprint_of(state.model, kv_blocks.layout)).digest
    state.tenants = Tenants(BLOCK_SIZE, root_key(namespace), config.secret.encode() or None)
    publish(state.public_prefixes, state.reader.tokens, state.tenants.published)
    async with AsyncExitStack() as stack:
        try:
            opened = await stack.enter_async_context(open_store(config, namespace, kv_blocks.layout))
        except ValueError as error:
            raise PrefixStoreError(str(error)) from error
        except OSError as error:
            raise ModelError(f"--prefix-disk {config.disk}: {error.strerror or error}") from error
        state.opened_store = state.metrics.prefixes.opened = opened
        auditor = PrefixAuditor(
            config.audit_every,
            state.engine,
            state.reader.sequences,
            lambda prefix: _remove_suspect_prefix(state, opened.store, prefix),
        )
        sharing = state.prefixes.over(opened.store, namespace, state.engine.engine, auditor)
        await stack.enter_async_context(sharing)
        yield


async def forget_all(state: ServerState, store: PrefixStore) -> int:
    """Empties the tiers, and makes the engine's blocks unfindable; returns how many blocks the tiers had."""
    return await _remove(state, state.engine.engine.forget_prefixes, store.clear)


async def _remove_suspect_prefix(state: ServerState, store: PrefixStore, prefix: StoredPrefix) -> None:
    """Removes the restored blocks of a prefix from wherever this process keeps them."""
    blocks = prefix.chain.blocks[: prefix.restored]
    keys, engine = [block.key for block in blocks], state.engine.engine
    await _remove(state, lambda: engine.forget_blocks(keys), lambda: store.discard(blocks))


async def _remove(state: ServerState, forget: Callable[[], None], from_tiers: Callable[[], Awaitable[int]]) -> int:
    """Removes blocks from the engine's memory and from the tiers; returns how many the tiers had."""
    removed = 0
    for _ in range(2):  # again for blocks that were restored and stored during the first pass
        await _in_engine(state, forget)
        await _settled(state)
        removed += await from_tiers()
    await _in_engine(state, forget)
    return removed


async def _settled(state: ServerState) -> None:
    """Waits for what is still being kept, or it would be there again afterwards; not for a tier that hangs."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SETTLE_SECONDS):
            await state.prefixes.settled()


async def _in_engine(state: ServerState, work: Callable[[], None]) -> None:
    """Has the engine's thread do something between two steps, and waits for it. Raises Unavailable after a minute."""
    if not state.engine.alive:
        raise Unavailable(NOT_RUNNING)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def command() -> None:
        work()
        loop.call_soon_threadsafe(settle)

    state.engine.command(command)
    try:
        async with asyncio.timeout(_ENGINE_SECONDS):
            await done
    except TimeoutError as error:
        raise Unavailable("the engine did not come to it in time; try again") from error
