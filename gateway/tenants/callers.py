"""Who sends a request: the virtual key of its credential, known for a while, else asked for in Redis."""

import asyncio
import contextlib
import functools
import time
from typing import NamedTuple

from multidict import CIMultiDictProxy

from cache.entries.key import namespace_for
from cache.errors import StoreUnavailable
from cache.stores.redis_store import RedisStore
from gateway.errors import CacheUnavailable, KeyRefused, KeyRequired
from gateway.settings.settings import Settings
from gateway.tenants.caller import NO_HEADERS, Caller
from gateway.tenants.credentials import NAMESPACE_HEADER, carries, credential
from gateway.tenants.key_registry import KeyRegistry
from gateway.tenants.virtual_key import SECRET_PREFIX, VirtualKey

_POLL_SECONDS = 0.2
_MOST_KNOWN = 20_000
# Anyone may send as many texts as it likes, of some kilobytes each.
_MOST_KEYLESS = 1_000
# A request with a key that this process has not met waits so many seconds for a Redis that is away.
_PATIENCE = 0.5


class _Known(NamedTuple):
    caller: Caller
    version: bytes | None
    until: float
    """Monotonic seconds."""


class Callers:
    """Finds the caller of a request.

    Without `keys.required` that is whoever sends the same credential. With it a request needs a virtual key.
    """

    def __init__(self, redis: RedisStore | None, settings: Settings) -> None:
        self._redis = redis
        self._registry = None if redis is None else KeyRegistry(redis)
        self._is_required = settings.keys.required
        # A virtual key is a credential, whatever else separates tenants.
        self._separated_by = "authorization" if self._is_required else settings.cache.namespace
        self._admin_key = settings.admin_key
        self._is_closed = settings.keys.without_redis == "closed"
        self._known_for = settings.keys.known_for
        self._known: dict[str, _Known] = {}
        self._without_key = functools.lru_cache(_MOST_KEYLESS)(self._made_without_key)
        self._version: bytes | None = None

    def known(self, headers: CIMultiDictProxy[str]) -> Caller | None:
        """The caller, if nothing has to be waited for; a dictionary is looked up, and Redis is not asked.

        The lookup takes no longer for a text that is nearly a key: its hash is keyed by a secret of the process.
        """
        text = credential(headers, self._separated_by)
        if not self._is_required:
            return self._without_key(text)
        found = self._known.get(text)
        if found is None or found.version is not self._version or found.until < time.monotonic():
            return None
        if self._is_closed and self._redis is not None and self._redis.breaker.is_open:
            return None
        return found.caller

    async def identify(self, headers: CIMultiDictProxy[str]) -> Caller:
        """The caller of a request.

        Raises KeyRequired, KeyRefused (with the same text for unknown, revoked and expired keys), and CacheUnavailable
        when Redis is away and the key is unknown or `keys.without_redis` is closed.
        """
        caller = self.known(headers)
        if caller is not None:
            return caller
        text = credential(headers, "authorization")
        if not text:
            raise KeyRequired(
                "This gateway needs a key: send `Authorization: Bearer KEY`, or the key in x-api-key or api-key."
            )
        version = self._version
        try:
            key = await self._find(text, 0.0 if text in self._known else _PATIENCE)
        except StoreUnavailable as error:
            return self._without_redis(text, error)
        if key is None:
            self._known.pop(text, None)
            raise KeyRefused("The key is not valid: it is unknown, revoked or expired.")
        return self._keep(text, key, version)

    async def follow(self) -> None:
        """Notice changes of keys and teams, whoever makes them; runs for as long as keys are required."""
        while self._registry is not None:
            with contextlib.suppress(StoreUnavailable):  # what is known is asked for again after `known_for`
                version = await self._registry.version()
                if version != self._version:
                    self._version = version
            await asyncio.sleep(_POLL_SECONDS)

    async def _find(self, text: str, patience: float) -> VirtualKey | None:
        registry, redis = self._registry, self._redis
        if registry is None or redis is None:
            raise StoreUnavailable("there is no Redis")
        scheme, _, secret = text.partition(" ")
        if scheme.lower() != "bearer" or not secret.startswith(SECRET_PREFIX):
            secret = text  # no key, which Redis is asked for all the same: so that each refusal takes as long
        return await redis.patiently(lambda _: registry.find_by_secret(secret), patience)

    def _made_without_key(self, text: str) -> Caller:
        namespace = namespace_for(text)
        is_operator = self._admin_key is not None and carries(text, self._admin_key)
        is_told = self._separated_by.startswith("header:")  # which no upstream knows to separate tenants
        own = {NAMESPACE_HEADER: namespace} if is_told else NO_HEADERS
        return Caller(namespace, text, None, is_operator, own)

    def _keep(self, text: str, key: VirtualKey, version: bytes | None) -> Caller:
        namespace = namespace_for(key.tenant)
        caller = Caller(namespace, key.tenant, key, own={NAMESPACE_HEADER: namespace})
        known_for = self._known_for
        if key.expires is not None:
            known_for = min(known_for, key.expires - time.time())
        if len(self._known) >= _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        # The version from before Redis was asked: of a change since then the reply may know nothing.
        self._known[text] = _Known(caller, version, time.monotonic() + known_for)
        return caller

    def _without_redis(self, text: str, error: StoreUnavailable) -> Caller:
        found = self._known.get(text)
        if found is None or self._is_closed:
            raise CacheUnavailable("Keys cannot be checked now: the shared store does not answer.") from error
        key = found.caller.key
        if key is not None and key.expires is not None and key.expires <= time.time():
            raise KeyRefused("The key is not valid: it is unknown, revoked or expired.") from error
        return found.caller
