"""Strategies that an operator has set while the gateway runs, the same for the workers of all hosts through Redis.

They are fields of one hash, beside a version that is another one after each change. Without Redis they are this
process's, until it ends.
"""

import asyncio
import contextlib
import secrets

import msgspec

from cache.errors import StoreUnavailable
from gateway.errors import CacheUnavailable
from gateway.routing.prefixes.shared_history import Commands
from gateway.routing.table import RoutingTable, StrategyOverride

_KEY = "keepgate:strategies"
_VERSION = "version"
_MODEL = "model:"
_INTERVAL = 0.2
_DEADLINE = 2.0

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(StrategyOverride).decode


class StrategyOverrides:
    """Sets strategies in `table`, in this process and in all others. `follow` runs for as long as it is used."""

    def __init__(self, table: RoutingTable, store: Commands | None) -> None:
        self._table = table
        self._store = store
        self._version: bytes | None = None
        self._reading = asyncio.Lock()

    async def set(self, model: str, strategy: str) -> None:
        """Raises InvalidRequest for a strategy that there is not, and CacheUnavailable if Redis does not answer."""
        override = self._table.override(model, strategy)
        await self._change(model, override)

    async def remove(self, model: str) -> None:
        """Let the settings say a model's strategy again. Raises CacheUnavailable, and may be repeated then."""
        await self._change(model, None)

    async def read(self) -> None:
        """Take over what has changed. Raises StoreUnavailable."""
        if self._store is None:
            return
        async with self._reading:  # so that what was read first is not taken over last
            if await self._store.command(("HGET", _KEY, _VERSION), _DEADLINE) == self._version:
                return
            flat = await self._store.command(("HGETALL", _KEY), _DEADLINE)
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            self._table.overrides = _overrides(fields)
            self._version = fields.get(_VERSION.encode())

    async def follow(self) -> None:
        """Notice changes, whoever makes them; while Redis is away, what is known stays."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self.read()
            await asyncio.sleep(_INTERVAL)

    async def _change(self, model: str, override: StrategyOverride | None) -> None:
        if self._store is None:
            others = {name: known for name, known in self._table.overrides.items() if name != model}
            self._table.overrides = others if override is None else {**others, model: override}
            return
        field, version = _MODEL + model, (_VERSION, secrets.token_hex(8))
        try:
            if override is None:
                await self._store.command(("HDEL", _KEY, field), _DEADLINE)
                await self._store.command(("HSET", _KEY, *version), _DEADLINE)
            else:
                await self._store.command(("HSET", _KEY, field, _encode(override), *version), _DEADLINE)
            await self.read()
        except StoreUnavailable as error:
            raise CacheUnavailable(
                f"Strategies that are set while running are kept in the shared store, which does not answer: {error}."
            ) from error


def _overrides(fields: dict[bytes, bytes]) -> dict[str, StrategyOverride]:
    found: dict[str, StrategyOverride] = {}
    for field, value in fields.items():
        name = field.decode()
        if name.startswith(_MODEL):
            with contextlib.suppress(msgspec.DecodeError):  # of another version, with strategies of its own
                found[name.removeprefix(_MODEL)] = _decode(value)
    return found
