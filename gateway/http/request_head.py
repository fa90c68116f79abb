"""Requests that two servers may read differently are refused: by no request smuggling (RFC 9112, section 11.2)."""

import functools
import re

from aiohttp import HttpVersion10, HttpVersion11
from aiohttp.http import RawRequestMessage

from gateway.errors import GatewayError, InvalidRequest, MethodNotAllowed

_VERSIONS = (HttpVersion10, HttpVersion11)
# TRACE would tell a client the headers that an upstream gets, with the operator's credential; CONNECT is no request.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_ENCODINGS = frozenset({"identity", "gzip", "deflate", "br", "zstd"})
_SUSPECT = ("\\", "%", ";")
# What some servers read as another path: a backslash as a slash, escaped twice, a control character, `/..;/`.
_AMBIGUOUS = re.compile(r"\\|%5c|%[01][0-9a-f]|%7f|%25(?:2e|2f|5c)|/(?:\.|%2e)+;", re.IGNORECASE)


def fault_of_head(message: RawRequestMessage) -> GatewayError | None:
    """Why a request that the parser has read is refused all the same, if so."""
    headers = message.headers
    if message.version is not HttpVersion11 and message.version not in _VERSIONS:
        return _refused("It speaks neither HTTP/1.1 nor HTTP/1.0", 505)
    if message.method not in _METHODS:
        return MethodNotAllowed(f"The method must be one of {', '.join(sorted(_METHODS))}.")
    coding = headers.get("Transfer-Encoding")
    if coding is not None and (coding.strip().lower() != "chunked" or message.version == HttpVersion10):
        return _refused("Its Transfer-Encoding must be chunked alone, in HTTP/1.1")
    encoding = headers.get("Content-Encoding")
    if encoding is not None and encoding.strip().lower() not in _ENCODINGS:
        # An upstream would get the body as it is, without the header that tells how to read it.
        return _refused("Its Content-Encoding must be one of gzip, deflate, br and zstd", 415)
    return _fault_of_target(message.path, headers.get("Host", ""))


def _fault_of_target(target: str, host: str) -> GatewayError | None:
    if not target.startswith("/") and target != "*":
        # The absolute form (RFC 9112, section 3.2.2) names the host once more.
        authority = target.partition("://")[2].partition("/")[0].partition("?")[0]
        if authority.lower() != host.lower() or not authority:
            return _refused("Its target names another host than its Host header")
    if _is_ambiguous(target.partition("?")[0]):
        return _refused("Servers differ in how they read its path")
    return None


@functools.lru_cache(1024)
def _is_ambiguous(path: str) -> bool:
    return any(mark in path for mark in _SUSPECT) and _AMBIGUOUS.search(path) is not None


def _refused(reason: str, status: int = 400) -> InvalidRequest:
    error = InvalidRequest(f"The request is refused. {reason}.", code="ambiguous_request")
    error.status = status
    return error
