"""TLS on both sides: certificates of the gateway for its clients, and what it trusts of an upstream."""

import functools
import ssl

from gateway.settings.fields import SettingsError
from gateway.settings.operations import TlsSettings
from gateway.settings.upstreams import UpstreamSettings


def make_ssl_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """The context of a server that speaks TLS 1.2 and 1.3; None where no certificate is set.

    Raises SettingsError for one file without the other, and for files that cannot be read or do not belong together.
    """
    files = _files(settings)
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _load(context, *files)
    return context


def load_certificate(context: ssl.SSLContext, settings: TlsSettings) -> None:
    """Let a context that is in use show a renewed certificate to new connections. Raises what make_ssl_context does,
    and then the context is as it was.
    """
    make_ssl_context(settings)  # a failure within the running context would leave it with half of a pair
    files = _files(settings)
    if files is None:
        raise SettingsError("tls.certificate: cannot be taken away while running")
    _load(context, *files)


def upstream_context(settings: UpstreamSettings) -> ssl.SSLContext | None:
    """What is trusted of an upstream; None for the system's certificates. Raises SettingsError."""
    if not settings.verify_tls:
        return _trusting_all()
    return None if settings.ca_file is None else _trusting(settings.ca_file, settings.name or settings.url)


def fault_of_certificate(error: ssl.SSLCertVerificationError) -> str:
    """Why a certificate is not accepted, such as "its certificate is not valid: certificate has expired"."""
    return f"its certificate is not valid: {error.verify_message.rstrip('.') or 'it cannot be verified'}"


def _files(settings: TlsSettings) -> tuple[str, str] | None:
    if settings.certificate is None and settings.key is None:
        return None
    if settings.key is None or settings.certificate is None:
        missing, given = ("key", "certificate") if settings.key is None else ("certificate", "key")
        raise SettingsError(f"tls.{missing}: expected the path of a file, since tls.{given} is set")
    return settings.certificate, settings.key


def _load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    for name, path in (("certificate", certificate), ("key", key)):
        _read(f"tls.{name}", path)
    # Without this a key with a passphrase would have OpenSSL ask on the terminal.
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except _Encrypted as error:
        raise SettingsError(f"tls.key: {key} has a passphrase; expected a key without one") from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"tls.key: {key} is not the key of the certificate in {certificate}") from error
        name, path, wanted = ("certificate", certificate, "a certificate chain")
        if _is_certificate(certificate):
            name, path, wanted = ("key", key, "a private key")
        raise SettingsError(f"tls.{name}: expected {wanted} in PEM form in {path}") from error


class _Encrypted(Exception):
    pass


def _no_passphrase() -> str:
    raise _Encrypted


def _read(name: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise SettingsError(f"{name}: cannot read the file {path}: {error.strerror}") from error


def _is_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True


def _trusting(ca_file: str, upstream: str) -> ssl.SSLContext:
    name = f"upstreams: {upstream}: ca_file"
    _read(name, ca_file)
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise SettingsError(f"{name}: expected certificates in PEM form in {ca_file}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


@functools.cache  # the pool of connections keeps those of different contexts apart
def _trusting_all() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
