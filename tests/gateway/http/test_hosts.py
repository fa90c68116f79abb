"""A gateway on the loopback answers no web page that pretends to be there, and no page of another origin."""

import time
from typing import Any

import pytest
from multidict import CIMultiDict

from gateway.errors import ForeignOrigin, MisdirectedRequest
from gateway.http.hosts import HostCheck, is_loopback
from gateway.settings.limits import KeySettings
from gateway.settings.operations import SecuritySettings
from gateway.settings.settings import Settings


def refusal(asked: str | None, origin: str | None = None, hosts: tuple[str, ...] = (), **settings: Any) -> Any:
    """The class of the error, None where the request is answered."""
    check = HostCheck(Settings(security=SecuritySettings(hosts=hosts), **settings))
    headers = CIMultiDict({name: text for name, text in (("Host", asked), ("Origin", origin)) if text is not None})
    refused = [check.refusal(headers) for _ in range(2)]  # the second time from what is known
    assert type(refused[0]) is type(refused[1])
    return None if refused[0] is None else type(refused[0])


OWN = [
    "127.0.0.1",
    "127.0.0.1:8080",
    "localhost:8080",
    "LocalHost",
    "localhost.",
    "app.localhost:1",
    "[::1]:8080",
    "127.9.9.9",
]
FOREIGN = ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1:80:80"]
FOREIGN += ["", "[::2]", "10.0.0.1", "a b", "localhost@evil", "127.0.0.1/", "evil#localhost", "[localhost"]


@pytest.mark.parametrize("host", OWN)
def test_names_of_the_loopback_are_answered(host: str) -> None:
    """With any port: a forwarded port is another."""
    assert refusal(host) is None


@pytest.mark.parametrize("host", FOREIGN)
def test_another_host_is_misdirected(host: str) -> None:
    """A page whose name leads to 127.0.0.1 sends that name (DNS rebinding)."""
    assert refusal(host) is MisdirectedRequest
    assert refusal(host, keys=KeySettings(required=True), admin_key="k") is None  # a page knows no key
    assert refusal(host, keys=KeySettings(required=True)) is MisdirectedRequest  # but could use the admin API
    assert refusal(host, host="192.168.1.5") is None  # the operator chose to be reached by names
    assert refusal(host, hosts=("*",)) is None


def test_further_names_are_answered() -> None:
    """Those in security.hosts, then on every address and with keys."""
    variants: list[dict[str, Any]] = [{}, {"host": "192.168.1.5"}, {"keys": KeySettings(required=True)}]
    for settings in variants:
        assert refusal("Gateway.Example.org:443", hosts=("gateway.example.org",), **settings) is None
        assert refusal("evil.example", hosts=("gateway.example.org",), **settings) is MisdirectedRequest
        assert refusal("localhost", hosts=("gateway.example.org",), **settings) is None


def test_a_request_without_a_host_is_answered() -> None:
    """HTTP/1.0 of a health check; every browser sends one."""
    assert refusal(None) is None


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost:3000", "null", "", "file://", "127.0.0.1:8080"]
)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    """Also one of another port, unless the setting cors_origins lists it."""
    assert refusal("127.0.0.1:8080", origin) is ForeignOrigin
    assert refusal("127.0.0.1:8080", origin, cors_origins=("*",)) is None
    assert refusal("127.0.0.1:8080", origin, cors_origins=(origin,)) is None
    assert refusal("127.0.0.1:8080", origin, keys=KeySettings(required=True), admin_key="k") is None


def test_the_gateways_own_page_is_answered() -> None:
    """Its origin is the host that it asks; without a host there is none."""
    assert refusal("127.0.0.1:8080", "http://127.0.0.1:8080") is None
    assert refusal("LocalHost:8080", "http://localhost:8080") is None
    assert refusal(None, "null") is ForeignOrigin


@pytest.mark.parametrize(
    ("host", "is_own"), [("localhost", True), ("127.0.0.1", True), ("::1", True), ("10.0.0.1", False), ("a", False)]
)
def test_the_loopback_is_known(host: str, is_own: bool) -> None:
    """By its names and addresses."""
    assert is_loopback(host) == is_own


def test_a_known_host_costs_less_than_a_microsecond() -> None:
    """A generous bound for a busy machine."""
    check = HostCheck(Settings())
    headers = CIMultiDict({"Host": "127.0.0.1:8080", "Content-Type": "application/json"})
    best = min(_seconds(check, headers) for _ in range(20))
    assert best < 1_000 * 2e-6


def _seconds(check: HostCheck, headers: CIMultiDict[str]) -> float:
    began = time.perf_counter()
    for _ in range(1_000):
        check.refusal(headers)
    return time.perf_counter() - began
