"""Settings that are refused at the start, and those that contradict each other without being refused."""

import importlib.util
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from yarl import URL

from gateway.commands.doctor.finding import Finding, ok, problem, warning
from gateway.http.hosts import is_loopback
from gateway.http.tls import make_ssl_context
from gateway.settings.encryption_keys import encryption_keys
from gateway.settings.fields import SettingsError
from gateway.settings.settings import Settings

CERTIFICATE_DAYS = 14
"""A certificate that ends within so many days is worth a warning."""
_MESSAGE_ADVICE = "do what the message says, and run `keepgate doctor` again"


def refused(error: SettingsError) -> Finding:
    """The settings cannot be read as they are."""
    return problem("settings", str(error), "correct it there, and run `keepgate doctor` again: it stops at the first")


async def check_settings(settings: Settings, warnings: Sequence[str]) -> list[Finding]:
    """What would be refused, what contradicts itself, and `warnings` of reading the settings."""
    found = [_of_reading(text) for text in warnings]
    found += _refusals(settings)
    found += _contradictions(settings)
    found += _certificate(settings)
    if not found:
        found.append(ok("settings", "no key is unknown, and none contradicts another"))
    return found


def _of_reading(text: str) -> Finding:
    if "is not a setting" in text:
        return warning("settings", text, "correct the name, or unset the variable: it has no effect")
    return warning("settings", text, "take it out, or take the upstreams out")


def _refusals(settings: Settings) -> Iterator[Finding]:
    """What `keepgate serve` finds out only while it starts."""
    checks: list[Callable[[], Any]] = [
        lambda: make_ssl_context(settings.tls),
        lambda: encryption_keys(settings.encryption),
    ]
    for check in checks:
        try:
            check()
        except SettingsError as error:
            yield problem("settings", str(error), _MESSAGE_ADVICE)
    if settings.traces.exporter == "file" and settings.traces.file is None:
        yield problem("settings", "traces.exporter is file, and traces.file names none", "name the file in traces.file")
    if settings.traces.exporter != "none" and not _is_there("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto"):
        yield _extra("traces.exporter", settings.traces.exporter, "tracing")
    if any(server.kv_events for server in settings.servers) and not _is_there("zmq"):
        yield _extra("upstreams: kv_events", "tcp://…", "kv-events")
    if settings.semantic.mode != "off" and settings.redis == "none" and settings.workers > 1:
        yield problem(
            "settings",
            f"semantic.mode is {settings.semantic.mode}, and {settings.workers} workers without a redis keep their"
            " answers apart",
            "set redis to embedded or to a URL, or workers to 1",
        )


def _is_there(*modules: str) -> bool:
    try:
        return all(importlib.util.find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # a package above it is not there
        return False


def _extra(setting: str, value: str, name: str) -> Finding:
    return problem(
        "settings",
        f"{setting} is {value}, and what it needs is not installed",
        f"install the extra: pip install 'keepgate[{name}]'",
    )


def _contradictions(settings: Settings) -> Iterator[Finding]:
    timeouts = settings.timeouts
    for name, seconds in (("first_byte", timeouts.first_byte), ("idle", timeouts.idle), ("connect", timeouts.connect)):
        if seconds > timeouts.total:
            yield warning(
                "settings",
                f"timeouts.{name} ({seconds:g} s) is longer than timeouts.total ({timeouts.total:g} s), which ends"
                " requests first",
                f"set timeouts.{name} below timeouts.total",
            )
    if settings.retries.attempts and settings.retries.first_pause > settings.retries.longest_pause:
        yield warning(
            "settings",
            f"retries.first_pause ({settings.retries.first_pause:g} s) is longer than retries.longest_pause"
            f" ({settings.retries.longest_pause:g} s)",
            "set retries.first_pause below retries.longest_pause",
        )
    if settings.health.deadline > settings.health.interval:
        yield warning(
            "settings",
            f"health.deadline ({settings.health.deadline:g} s) is longer than health.interval"
            f" ({settings.health.interval:g} s)",
            "set health.deadline below health.interval",
        )
    if not settings.cache.enabled and settings.semantic.mode != "off":
        yield warning(
            "settings",
            f"cache.enabled is false, and semantic.mode is {settings.semantic.mode}: without the exact cache there are"
            " no answers for the semantic one",
            "set cache.enabled to true, or semantic.mode to off",
        )
    if settings.cache.enabled and settings.cache.ttl == 0 and not settings.cache.stale_if_error:
        yield warning(
            "settings",
            "cache.ttl is 0: an answer is stale as soon as it is stored, and no request is a hit",
            "set cache.ttl to the seconds for which an answer may be used, or cache.enabled to false",
        )
    if settings.redis == "none" and settings.workers > 1 and settings.cache.enabled:
        yield warning(
            "settings",
            f"redis is none: each of {settings.workers} workers has a cache of its own, and purges reach one of them",
            "set redis to embedded or to a URL, or workers to 1",
        )
    if settings.semantic.mode != "off" and settings.semantic.policy == "threshold":
        yield warning(
            "settings",
            "semantic.policy is threshold: it serves similar questions without a bound on wrong answers",
            "set semantic.policy to budget, and semantic.delta to the share of wrong answers that is acceptable",
        )
    yield from _upstreams(settings)
    if settings.hedging.after and len(settings.servers) == 1:
        yield warning(
            "settings",
            "hedging.after is set, and there is one upstream: no second one can be asked",
            "name another upstream, or set hedging.after to 0",
        )


def _upstreams(settings: Settings) -> Iterator[Finding]:
    """An upstream that is the gateway itself, and one that is named twice."""
    seen: set[str] = set()
    for server in settings.servers:
        if server.url.startswith("mock:"):
            continue
        url = URL(server.url)
        is_here = is_loopback(url.host or "") or url.host == settings.host
        if is_here and settings.port and url.port == settings.port:
            yield problem(
                "settings",
                f"the upstream {server.url} is this gateway itself: each request would go round in a circle",
                "name the port of the server behind it, or choose another port for the gateway",
            )
        plain = server.url.rstrip("/").removesuffix("/v1")
        if plain in seen and server.api_key is None:
            yield warning(
                "settings",
                f"the upstream {server.url} is named twice: it gets twice its share of requests",
                "take one out, or give one a `weight`",
            )
        seen.add(plain)


def _certificate(settings: Settings) -> Iterator[Finding]:
    if settings.tls.certificate is None:
        return
    try:
        # The only decoder of certificates in the standard library; it has no public name.
        fields = ssl._ssl._test_decode_cert(str(Path(settings.tls.certificate)))  # type: ignore[attr-defined]
    except (OSError, ssl.SSLError, AttributeError):  # make_ssl_context has said what is wrong with it
        return
    yield from expiry("tls", f"tls.certificate {settings.tls.certificate}", fields)


def expiry(check: str, name: str, certificate: dict[str, Any]) -> Iterator[Finding]:
    """Whether a certificate, as `ssl` decodes them, ends soon."""
    ends = ssl.cert_time_to_seconds(certificate["notAfter"])
    day = datetime.fromtimestamp(ends, UTC).strftime("%Y-%m-%d")
    days = (ends - time.time()) / 86_400
    if days < 0:
        yield problem(check, f"{name} ended on {day}", "renew it; a running gateway takes it over on SIGHUP")
    elif days < CERTIFICATE_DAYS:
        yield warning(check, f"{name} ends on {day}, in {days:.0f} days", "renew it before")
    else:
        yield ok(check, f"{name} is valid until {day}")
