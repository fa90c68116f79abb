"""Settings that are refused at the start, contradict each other, or let too many in."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from gateway.commands.doctor.configuration import check_settings
from gateway.commands.doctor.exposure import check_exposure
from gateway.commands.doctor.finding import Finding
from gateway.commands.doctor.machine import check_memory, check_open_files, check_processor, missing_kernels
from gateway.settings.fields import Size
from gateway.settings.settings import Settings


def settings(**values: Any) -> Settings:
    return msgspec.convert(
        {"upstreams": ["mock:"], "redis": "none", **values}, Settings, dec_hook=lambda kind, value: kind(value)
    )


async def said_of(values: dict[str, Any]) -> list[Finding]:
    """What is not ok of the settings."""
    return [each for each in await check_settings(settings(**values), []) if each.status != "ok"]


async def test_settings_without_a_fault_are_one_line() -> None:
    """Nothing to say is said once."""
    (only,) = await check_settings(settings(), [])
    assert only.status == "ok"


@pytest.mark.parametrize(
    ("values", "status", "words"),
    [
        ({"timeouts": {"first_byte": 10, "idle": 5, "connect": 1, "total": 8}}, "warning", "timeouts.first_byte"),
        ({"retries": {"first_pause": 9}}, "warning", "retries.longest_pause"),
        ({"health": {"interval": 1, "deadline": 2}}, "warning", "health.deadline"),
        ({"cache": {"ttl": 0}}, "warning", "no request is a hit"),
        ({"workers": 2}, "warning", "a cache of its own"),
        ({"hedging": {"after": 1}}, "warning", "no second one"),
        ({"semantic": {"mode": "on", "policy": "threshold"}}, "warning", "without a bound"),
        ({"semantic": {"mode": "on"}, "cache": {"enabled": False}}, "warning", "cache.enabled is false"),
        ({"upstreams": ["http://localhost:8080/v1"]}, "problem", "is this gateway itself"),
        ({"upstreams": ["http://gpu:1/v1", "http://gpu:1"]}, "warning", "is named twice"),
        ({"traces": {"exporter": "file"}}, "problem", "traces.file"),
        ({"encryption": {"key": "env:NO_SUCH_KEY"}}, "problem", "NO_SUCH_KEY"),
        ({"tls": {"certificate": "/no/file", "key": "/no/key"}}, "problem", "tls.certificate"),
    ],
)
async def test_a_contradiction_names_the_settings(values: dict[str, Any], status: str, words: str) -> None:
    """Each with the keys that do not go together, and what to do."""
    (only,) = await said_of(values)
    assert (only.status, words in only.summary, bool(only.advice)) == (status, True, True), only


async def test_an_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the settings ask for and is not installed, with the words of pip."""
    monkeypatch.setattr("gateway.commands.doctor.configuration._is_there", lambda *modules: False)
    server = {"url": "http://127.0.0.1:1", "kv_events": "tcp://gpu:5557"}
    said = await said_of({"traces": {"exporter": "otlp"}, "upstreams": [server]})
    assert [each.advice for each in said] == [
        "install the extra: pip install 'keepgate[tracing]'",
        "install the extra: pip install 'keepgate[kv-events]'",
    ]


@pytest.mark.parametrize(("days", "status"), [(-1, "problem"), (3, "warning"), (90, "ok")])
async def test_a_certificate_that_ends_is_told_in_time(tmp_path: Path, days: int, status: str) -> None:
    """The gateway's own certificate: over, soon over, or good."""
    ends = datetime.now(UTC) + timedelta(days=days)
    issued = trustme.CA().issue_cert("localhost", not_before=ends - timedelta(days=30), not_after=ends)
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "chain.pem"))
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    tls = {"certificate": str(tmp_path / "chain.pem"), "key": str(tmp_path / "key.pem")}
    (only,) = await check_settings(settings(tls=tls), [])
    assert (only.check, only.status, f"{ends:%Y-%m-%d}" in only.summary) == ("tls", status, True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"host": "0.0.0.0", "tls": {"certificate": "c", "key": "k"}}, "admin_key is not set"),  # noqa: S104
        ({"host": "0.0.0.0", "admin_key": "k" * 48}, "without TLS"),  # noqa: S104
        (
            {"host": "0.0.0.0", "admin_key": "k", "tls": {"certificate": "c", "key": "k"}},  # noqa: S104
            "admin_key has 1 characters",
        ),
        ({"keys": {"required": True}}, "without an admin_key"),
        ({"security": {"hosts": ["*"]}}, "security.hosts is *"),
        ({"security": {"urls": "any"}}, "security.urls is any"),
        ({"cors_origins": ["*"]}, "cors_origins is *"),
        ({"upstreams": ["http://api.example.com/v1"]}, "over the internet without TLS"),
        ({"upstreams": [{"url": "https://api.example.com/v1", "verify_tls": False}]}, "verify_tls is false"),
    ],
)
async def test_what_lets_too_many_in_is_a_warning(values: dict[str, Any], words: str) -> None:
    """Each with what to set instead."""
    (only,) = await check_exposure(settings(**values))
    assert (only.status, words in only.summary, bool(only.advice)) == ("warning", True, True), only


async def test_a_credential_that_anybody_may_spend_is_a_problem() -> None:
    """An upstream with the operator's credential, an open address and no keys."""
    tls = {"certificate": "c", "key": "k"}
    server = {"url": "https://api.example.com/v1", "name": "provider", "api_key": "env:KEY"}
    values = {"host": "0.0.0.0", "admin_key": "k" * 48, "tls": tls, "upstreams": [server]}  # noqa: S104
    (only,) = await check_exposure(settings(**values))
    assert (only.status, "provider" in only.summary, "keys.required" in only.advice) == ("problem", True, True)
    (fine,) = await check_exposure(settings(**values, keys={"required": True}))
    assert fine.status == "ok"


@pytest.mark.parametrize(
    "url", ["http://gpu-1:8000/v1", "http://10.0.0.7/v1", "http://vllm.models.svc:8000/v1", "http://[::1]:1/v1"]
)
async def test_hosts_of_the_own_network_may_go_without_tls(url: str) -> None:
    """Private addresses and names of the own network are no warning."""
    (only,) = await check_exposure(settings(upstreams=[url]))
    assert only.status == "ok"


async def test_a_memory_limit_below_the_cache_is_a_problem() -> None:
    """With a full cache every new request would be refused for want of memory."""
    (only,) = await check_memory(settings(limits={"memory": 2**20}))
    assert (only.status, "limits.memory" in only.summary) == ("problem", True)


async def test_more_memory_than_there_is_is_a_warning() -> None:
    """What the settings allow in all is compared with the machine's."""
    (only,) = await check_memory(settings(cache={"memory": Size(2**45)}))
    assert (only.status, "cache.memory" in only.advice) == ("warning", True)
    (fine,) = await check_memory(settings(cache={"memory": Size(2**20)}))
    assert fine.status == "ok"


async def test_more_workers_than_cores_are_a_warning() -> None:
    """The processor is named, and more processes than cores are told."""
    fine, *_ = await check_processor(settings())
    assert fine.status == "ok"
    findings = await check_processor(settings(workers=256))
    assert [each.status for each in findings] == ["ok", "warning"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"sse2", "avx2", "fma", "f16c"}, []),
        ({"fp", "asimd", "asimddp"}, ["the semantic cache's"]),
        ({"sse2", "avx2"}, ["the engine's", "the semantic cache's"]),
        (set(), ["the engine's", "the semantic cache's"]),
    ],
)
def test_kernels_that_a_processor_cannot_run_are_named(flags: set[str], said: list[str]) -> None:
    """The engine has kernels for x86-64 and Arm, the semantic cache for x86-64; what is off needs none."""
    both = missing_kernels(settings(upstreams=[], semantic={"mode": "on"}), flags)
    assert [each.partition(" kernels need ")[0] for each in both] == said
    assert missing_kernels(settings(), flags) == []


async def test_connections_beyond_the_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a process is compared with limits.max_connections."""
    monkeypatch.setattr("gateway.commands.doctor.machine.resource.getrlimit", lambda which: (20_000, 20_000))
    (fine,) = await check_open_files(settings(limits={"max_connections": 1000}))
    assert fine.status == "ok"
    (over,) = await check_open_files(settings(limits={"max_connections": 15_000}))
    assert (over.status, "LimitNOFILE" in over.advice) == ("warning", True)
    monkeypatch.setattr("gateway.commands.doctor.machine.resource.getrlimit", lambda which: (1024, 4096))
    assert (await check_open_files(settings()))[0].status == "warning"
