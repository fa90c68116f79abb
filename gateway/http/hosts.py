"""Which names a gateway answers to, and which web pages may send it requests: docs/decisions/031-security.md.

A browser sends what any page tells it to. A page whose name resolves to 127.0.0.1 (DNS rebinding) is known by its Host
header, and a page of another origin by its Origin header (RFC 6454, section 7).
"""

import ipaddress
import re
from collections.abc import Mapping

from gateway.errors import ForeignOrigin, GatewayError, MisdirectedRequest
from gateway.settings.settings import Settings

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?")
_MAX_KNOWN = 1_000
ANY = "*"


class HostCheck:
    """Refuses requests whose Host or Origin is another's.

    It is on where `security.hosts` names hosts, and where whoever reaches the gateway may use it, or its admin API,
    because it listens on the loopback alone: virtual keys are not required, or there is no admin key.
    """

    def __init__(self, settings: Settings) -> None:
        names = settings.security.hosts
        is_trusting = is_loopback(settings.host) and not (settings.keys.required and settings.admin_key is not None)
        self._is_on = ANY not in names and (bool(names) or is_trusting)
        self._names = {name.lower().rstrip(".") for name in (*names, settings.host)}
        self._origins = frozenset(settings.cors_origins)
        self._known: set[str] = set()

    def refusal(self, headers: Mapping[str, str]) -> GatewayError | None:
        """Why a request with these headers is not answered, if so. A request without a Host comes from no browser."""
        if not self._is_on:
            return None
        host = headers.get("Host")
        if host is not None and host not in self._known:
            if not self._is_ours(host):
                return MisdirectedRequest(
                    "This gateway does not answer for the host that the request names. The setting security.hosts"
                    " lists further names."
                )
            if len(self._known) < _MAX_KNOWN:
                self._known.add(host)
        origin = headers.get("Origin")
        if origin is not None and not self._may_ask(origin, host or ""):
            return ForeignOrigin(
                "Web pages of this origin may not use the gateway. The setting cors_origins lists those that may."
            )
        return None

    def _may_ask(self, origin: str, host: str) -> bool:
        if origin in self._origins or ANY in self._origins:
            return True
        return bool(host) and origin.partition("://")[2].lower() == host.lower()

    def _is_ours(self, host: str) -> bool:
        matched = _HOST.fullmatch(host)
        if matched is None:
            return False
        name = matched[1].lower().rstrip(".").strip("[]")
        return is_loopback(name) or name.endswith(".localhost") or name in self._names


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of the machine itself, for itself alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
