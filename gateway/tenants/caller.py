"""A caller, as the rest of the gateway knows it."""

from dataclasses import dataclass

from aiohttp import web

from gateway.tenants.virtual_key import VirtualKey


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    `namespace` separates answers, conversations, files and KV blocks: callers with the same one share them.
    `credential` is the text that it follows from. `key` is the virtual key, None where none is asked for.
    """

    namespace: str
    credential: str
    key: VirtualKey | None = None


CALLER = web.RequestKey("caller", Caller)
