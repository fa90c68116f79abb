"""Certificates: what the gateway shows to clients, and what it trusts of upstreams."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import trustme
from yarl import URL

from gateway.http.tls import load_certificate, make_ssl_context, upstream_context
from gateway.settings.fields import SettingsError
from gateway.settings.operations import TlsSettings
from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.connection import Exchange, Origin, open_connections, request_head

ENCRYPTED = b"""-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-256-CBC,6AFB9C1D1A1B5B2F7B9C5B6D7E8F9A0B

p0QeWyQ3N7rFzJ1tT0l6tQmQn9N3rXh0nq0l8T8x3i0=
-----END EC PRIVATE KEY-----
"""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def written(folder: Path, authority: trustme.CA, name: str = "localhost") -> TlsSettings:
    """The files of a new certificate."""
    certificate = authority.issue_cert(name)
    folder.mkdir(exist_ok=True)
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    return TlsSettings(certificate=str(chain), key=str(key))


@asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server of HTTP with this context; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def shown(port: int, authority: trustme.CA, **versions: ssl.TLSVersion) -> tuple[str, int]:
    """The version of TLS, and the serial number of the certificate that a client sees."""
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    trusting.maximum_version = versions.get("at_most", ssl.TLSVersion.MAXIMUM_SUPPORTED)
    trusting.minimum_version = versions.get("at_least", ssl.TLSVersion.TLSv1_2)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost")
    seen: ssl.SSLObject = writer.get_extra_info("ssl_object")
    certificate = seen.getpeercert()
    assert certificate is not None
    writer.transport.abort()
    return seen.version() or "", int(str(certificate["serialNumber"]), 16)


async def asked(port: int, settings: UpstreamSettings) -> bytes:
    """The answer of a server that is reached as an upstream with these settings."""
    origin = Origin(URL(f"https://localhost:{port}"), upstream_context(settings))
    async with open_connections(5.0) as pool:
        connection, _ = await pool.connection(origin)
        exchange = Exchange(connection)
        head = request_head("GET", "/", "localhost", {}, None)
        await exchange.begin(head, None, without_body=False, read_timeout=5.0)
        answer = await exchange.chunk(5.0)
        exchange.end()
        return answer


def test_without_files_there_is_no_tls() -> None:
    """It is plain HTTP then."""
    assert make_ssl_context(TlsSettings()) is None


async def test_a_server_speaks_modern_tls_only(tmp_path: Path, authority: trustme.CA) -> None:
    """TLS 1.3 and 1.2, and nothing older."""
    context = make_ssl_context(written(tmp_path, authority))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2  # also where the system allows clients more
    async with listening(context) as port:
        assert (await shown(port, authority))[0] == "TLSv1.3"
        assert (await shown(port, authority, at_most=ssl.TLSVersion.TLSv1_2))[0] == "TLSv1.2"
        with pytest.warns(DeprecationWarning, match="TLSv1"), pytest.raises((ssl.SSLError, ConnectionError)):
            await shown(port, authority, at_least=ssl.TLSVersion.TLSv1, at_most=ssl.TLSVersion.TLSv1_1)


async def test_a_renewed_certificate_is_shown_to_new_connections(tmp_path: Path, authority: trustme.CA) -> None:
    """While the server runs; a bad pair changes nothing."""
    settings = written(tmp_path, authority)
    context = make_ssl_context(settings)
    assert context is not None
    async with listening(context) as port:
        first = await shown(port, authority)
        written(tmp_path, authority)
        assert await shown(port, authority) == first
        load_certificate(context, settings)
        second = await shown(port, authority)
        assert second != first
        other = written(tmp_path / "other", authority)
        with pytest.raises(SettingsError):
            load_certificate(context, TlsSettings(certificate=other.certificate, key=settings.key))
        assert await shown(port, authority) == second
    with pytest.raises(SettingsError, match=r"tls\.certificate"):
        load_certificate(context, TlsSettings())


def refusal(certificate: Path | str | None, key: Path | str | None) -> str:
    """What is said of two files."""
    with pytest.raises(SettingsError) as caught:
        make_ssl_context(
            TlsSettings(certificate=certificate and str(certificate), key=key and str(key))  # type: ignore[arg-type]
        )
    return str(caught.value)


def test_files_that_cannot_be_used_are_named(tmp_path: Path, authority: trustme.CA) -> None:
    """With the setting and the reason, and nothing of their content."""
    good, other = written(tmp_path / "a", authority), written(tmp_path / "b", authority)
    text = tmp_path / "text.pem"
    text.write_text("secret text")
    locked = tmp_path / "locked.pem"
    locked.write_bytes(ENCRYPTED)
    assert refusal(good.certificate, None) == "tls.key: expected the path of a file, since tls.certificate is set"
    assert refusal(None, good.key) == "tls.certificate: expected the path of a file, since tls.key is set"
    assert refusal("/nowhere", good.key) == "tls.certificate: cannot read the file /nowhere: No such file or directory"
    assert refusal(good.certificate, tmp_path) == f"tls.key: cannot read the file {tmp_path}: Is a directory"
    assert refusal(text, good.key) == f"tls.certificate: expected a certificate chain in PEM form in {text}"
    assert refusal(good.certificate, text) == f"tls.key: expected a private key in PEM form in {text}"
    assert refusal(good.certificate, locked) == f"tls.key: {locked} has a passphrase; expected a key without one"
    mismatch = refusal(good.certificate, other.key)
    assert mismatch == f"tls.key: {other.key} is not the key of the certificate in {good.certificate}"


async def test_an_upstream_is_trusted_by_its_authority(tmp_path: Path, authority: trustme.CA) -> None:
    """With `ca_file`, or without a check; else it cannot be reached, for a reason that is told."""
    trusted = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(trusted))
    foreign = tmp_path / "foreign.pem"
    trustme.CA().cert_pem.write_to_path(str(foreign))
    context = make_ssl_context(written(tmp_path, authority))
    assert context is not None
    async with listening(context) as port:
        url = f"https://localhost:{port}"
        assert await asked(port, UpstreamSettings(url=url, ca_file=str(trusted))) == b"ok"
        assert await asked(port, UpstreamSettings(url=url, verify_tls=False)) == b"ok"
        for settings in (UpstreamSettings(url=url), UpstreamSettings(url=url, ca_file=str(foreign))):
            with pytest.raises(aiohttp.ClientConnectorError) as caught:
                await asked(port, settings)
            assert "certificate is not valid: unable to get local issuer" in (caught.value.os_error.strerror or "")


async def test_an_upstream_of_another_name_is_not_trusted(tmp_path: Path, authority: trustme.CA) -> None:
    """A certificate must name the host of the URL."""
    trusted = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(trusted))
    context = make_ssl_context(written(tmp_path, authority, "other.example"))
    assert context is not None
    async with listening(context) as port:
        with pytest.raises(aiohttp.ClientConnectorError) as caught:
            await asked(port, UpstreamSettings(url=f"https://localhost:{port}", ca_file=str(trusted)))
    assert "certificate is not valid: Hostname mismatch" in (caught.value.os_error.strerror or "")


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """With its upstream."""
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    with pytest.raises(SettingsError, match=r"upstreams: gpu: ca_file: expected certificates in PEM form in "):
        upstream_context(UpstreamSettings(url="https://gpu", name="gpu", ca_file=str(text)))
    with pytest.raises(SettingsError, match=r"upstreams: https://gpu: ca_file: cannot read the file /nowhere"):
        upstream_context(UpstreamSettings(url="https://gpu", ca_file="/nowhere"))
