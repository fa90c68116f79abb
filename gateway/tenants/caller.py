"""A caller, as the rest of the gateway knows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.tenants.credentials import CREDENTIAL_HEADERS
from gateway.tenants.virtual_key import VirtualKey

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    `namespace` separates answers, conversations, files and KV blocks: callers with the same one share them.
    `credential` is the text that it follows from. `key` is the virtual key, None where none is asked for. `own` are the
    gateway's own request headers by which an upstream knows the tenant that sends it no credential.
    """

    namespace: str
    credential: str
    key: VirtualKey | None = None
    is_operator: bool = False
    """Whether the credential is the admin key, which is the gateway's alone as well."""
    own: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)

    def forwarded(self, headers: CIMultiDictProxy[str]) -> CIMultiDictProxy[str]:
        """The headers of its request without the virtual key, which is the gateway's alone."""
        if self.key is None and not self.is_operator:
            return headers
        kept = CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in CREDENTIAL_HEADERS)
        return CIMultiDictProxy(kept)


CALLER = web.RequestKey("caller", Caller)
