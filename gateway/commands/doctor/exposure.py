"""Who may reach the gateway, and what they may do there."""

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from gateway.commands.doctor.finding import Finding, ok, problem, warning
from gateway.http.hosts import ANY, is_loopback
from gateway.settings.settings import Settings
from gateway.settings.upstreams import UpstreamSettings

_SHORT_KEY = 16


async def check_exposure(settings: Settings) -> list[Finding]:
    """Admin key, virtual keys, TLS, hosts, web pages, URLs in requests, credentials on the network."""
    found = [*_callers(settings), *_pages(settings), *_credentials(settings)]
    return found or [ok("exposure", _described(settings))]


def _described(settings: Settings) -> str:
    reach = "this machine" if is_loopback(settings.host) else f"whoever reaches {settings.host}:{settings.port}"
    keys = ", with a virtual key" if settings.keys.required else ""
    admin = "an admin key is set" if settings.admin_key is not None else "whoever reaches it may inspect and purge"
    return f"serves {reach}{keys}; {admin}"


def _callers(settings: Settings) -> Iterator[Finding]:
    if is_loopback(settings.host):
        if settings.keys.required and settings.admin_key is None:
            yield warning(
                "exposure",
                "keys.required is true without an admin_key: every user of this machine can make keys",
                "set KEEPGATE_ADMIN_KEY, such as to what `openssl rand -hex 24` prints",
            )
        return
    if settings.admin_key is None:
        yield warning(
            "exposure",
            f"admin_key is not set, and host is {settings.host}: the inspection API and `keepgate keys` are refused",
            "set KEEPGATE_ADMIN_KEY, such as to what `openssl rand -hex 24` prints",
        )
    elif len(settings.admin_key) < _SHORT_KEY:
        yield warning(
            "exposure",
            f"admin_key has {len(settings.admin_key)} characters, and {settings.host} may be reached from elsewhere: it"
            " can be guessed",
            "make a longer one: `openssl rand -hex 24`",
        )
    own = [server for server in settings.servers if server.api_key is not None]
    if own and not settings.keys.required:
        yield problem(
            "exposure",
            f"whoever reaches {settings.host}:{settings.port} spends the credential of"
            f" {', '.join(map(_name, own))}: no key is asked for",
            "set keys.required to true and make keys with `keepgate keys create`, or listen on 127.0.0.1",
        )
    if settings.tls.certificate is None:
        yield warning(
            "exposure",
            f"clients send their keys to {settings.host}:{settings.port} without TLS",
            "set tls.certificate and tls.key, or have a reverse proxy in front that speaks TLS",
        )


def _pages(settings: Settings) -> Iterator[Finding]:
    if is_loopback(settings.host) and ANY in settings.security.hosts:
        yield warning(
            "exposure",
            "security.hosts is * on the loopback: a web page whose name resolves to 127.0.0.1 may use the gateway",
            "list the names that clients use in security.hosts",
        )
    if ANY in settings.cors_origins and not settings.keys.required:
        yield warning(
            "exposure",
            "cors_origins is * without keys.required: any web page may use the gateway from its visitors' browsers",
            "list the origins of your apps in cors_origins",
        )
    if settings.security.urls == "any":
        yield warning(
            "exposure",
            "security.urls is any: a request may have upstreams fetch addresses of their private network",
            "set security.urls to public",
        )


def _credentials(settings: Settings) -> Iterator[Finding]:
    for server in settings.servers:
        url = urlsplit(server.url)
        if url.scheme == "http" and not _is_private(url.hostname or ""):
            yield warning(
                "exposure",
                f"{_name(server)}: prompts and credentials are sent over the internet without TLS",
                "use its https:// URL",
            )
        if url.scheme == "https" and not server.verify_tls:
            yield warning(
                "exposure",
                f"{_name(server)}: verify_tls is false: whoever is on the way can read prompts and credentials",
                "name the authority of its certificate in ca_file, and set verify_tls to true",
            )


def _is_private(host: str) -> bool:
    """Whether a host is of this machine or of a private network; names without a dot are of the own network."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return "." not in host or host.endswith((".internal", ".local", ".localhost", ".svc", ".lan"))


def _name(server: UpstreamSettings) -> str:
    return server.name or server.url
