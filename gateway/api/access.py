"""Who may operate the gateway: docs/decisions/006-admin-without-a-key.md."""

import hmac

from aiohttp import web

from gateway.api.app_keys import SETTINGS
from gateway.errors import AdminForbidden, AdminKeyRequired
from gateway.http.hosts import is_loopback
from gateway.settings.settings import Settings

_KEY_HEADER = "x-keepgate-admin-key"


def require_operator(request: web.Request) -> None:
    """The admin key, as a bearer token or in x-keepgate-admin-key; without one, only a gateway on loopback trusts.

    Raises AdminKeyRequired, and AdminForbidden where no key is set.
    """
    settings = request.app[SETTINGS]
    if settings.admin_key is None:
        if is_loopback(settings.host):
            return
        raise AdminForbidden("This needs an admin key, and none is set. Set admin_key (KEEPGATE_ADMIN_KEY).")
    given = request.headers.get(_KEY_HEADER) or request.headers.get("Authorization", "").removeprefix("Bearer ")
    # Header bytes that are not UTF-8 come as surrogates.
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), settings.admin_key.encode()):
        raise AdminKeyRequired("This needs the admin key, as a bearer token or in x-keepgate-admin-key.")


def carries_admin_key(authorization: str, settings: Settings) -> bool:
    """Whether an Authorization header carries the admin key, and must not be sent upstream."""
    if settings.admin_key is None:
        return False
    key, given = settings.admin_key.encode(), authorization.encode("utf-8", "surrogateescape")
    # Wherever in the header it is, in a time that does not tell how much of a guess is right.
    return any(hmac.compare_digest(given[at : at + len(key)], key) for at in range(len(given) - len(key) + 1))
