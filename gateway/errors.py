"""The errors that a client may get, in OpenAI's error form. The text of an error is where it is raised.

GatewayError
├── InvalidRequest        400  an invalid body, header or parameter; names the field
├── AdminKeyRequired      401/403
├── KeyRequired           401  a virtual key is missing
│   └── KeyRefused        401  unknown, revoked or expired
├── ModelNotAllowed       403  not among the models of the key
├── EndpointNotAllowed    403  not among those that keys may use
├── RateLimited           429  a limit of the key or its team
│   └── BudgetExceeded    429
├── ForeignOrigin         403  a web page of another origin
├── NotFound              404
│   └── NoPrefixStore     404  no upstream has a prefix store
├── MethodNotAllowed      405
├── RequestTimeout        408  the client sent too slowly
├── BodyTooLarge          413
├── MisdirectedRequest    421  the Host header names another server
├── InternalError         500  a fault of the gateway itself
├── UpstreamRefused       any  an upstream's own error, told in another form of API
├── UpstreamUnreachable   502  no connection, or it broke before an answer began
├── UpstreamDisconnected           502  it broke within an answer
├── CacheUnavailable             503  the shared store does not answer an operation that needs it
├── ShuttingDown          503  the gateway stops, and its time for requests under way is over
├── Overloaded            503  too little memory
│   └── TooBusy           429  too many connections or requests under way
├── NoUpstream            503  no upstream is ready
│   └── TooManyRequests   429  the queues of all upstreams are full
├── UpstreamTimeout       504
│   └── DeadlineExceeded  504  the deadline of the request itself
└── NotCached             504  only-if-cached, and it is not (RFC 9111, section 5.2.1.7)
"""

import math
from collections.abc import Mapping

import msgspec
from aiohttp import web

_encode = msgspec.json.Encoder().encode


class GatewayError(Exception):
    """`param` names the field at fault; `code` is for programs, the message for people."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code

    @property
    def label(self) -> str:
        """The label under which the metrics count it."""
        return self.code or self.kind

    @property
    def headers(self) -> dict[str, str]:
        return {}

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return _encode({"error": error})

    def response(self) -> web.Response:
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=self.headers)

    def event(self) -> bytes:
        """The error as the last event of a stream that has begun; no [DONE] follows it."""
        return b"data: " + self.body() + b"\n\n"


class InvalidRequest(GatewayError):
    status = 400
    kind = "invalid_request_error"


class AdminKeyRequired(GatewayError):
    status = 401
    kind = "authentication_error"
    code = "admin_key_required"


class AdminForbidden(AdminKeyRequired):
    status = 403


class KeyRequired(GatewayError):
    status = 401
    kind = "authentication_error"
    code = "key_required"

    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class KeyRefused(KeyRequired):
    code = "invalid_api_key"


class ModelNotAllowed(GatewayError):
    status = 403
    kind = "permission_error"
    code = "model_not_allowed"


class EndpointNotAllowed(GatewayError):
    status = 403
    kind = "permission_error"
    code = "endpoint_not_allowed"


class RateLimited(GatewayError):
    """`retry_after` is in seconds; `figures` are headers about the limit."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after: float, figures: Mapping[str, str]) -> None:
        super().__init__(message)
        self._retry_after = retry_after
        self._figures = figures

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(max(1, math.ceil(self._retry_after))), **self._figures}


class BudgetExceeded(RateLimited):
    kind = "insufficient_quota"
    code = "insufficient_quota"

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "x-should-retry": "false"}  # OpenAI's clients would try again


class NotFound(InvalidRequest):
    status = 404
    code = "not_found"


class NoPrefixStore(NotFound):
    code = "no_prefix_store"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class RequestTimeout(InvalidRequest):
    status = 408
    code = "request_timeout"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


class MisdirectedRequest(InvalidRequest):
    status = 421
    code = "wrong_host"


class ForeignOrigin(InvalidRequest):
    status = 403
    code = "foreign_origin"


class InternalError(GatewayError):
    code = "internal_error"


class ShuttingDown(GatewayError):
    status = 503
    code = "shutting_down"


class Overloaded(GatewayError):
    status = 503
    code = "overloaded"

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": "1"}


class TooBusy(Overloaded):
    status = 429
    kind = "rate_limit_error"
    code = "too_busy"


class UpstreamError(GatewayError):
    """No complete answer came from an upstream."""

    kind = "upstream_error"
    status = 502


class UpstreamRefused(UpstreamError):
    """An error that an upstream answered with, to be told in another form of API."""

    def __init__(self, status: int, message: str, kind: str, param: str | None, code: str | None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.kind = kind

    @property
    def label(self) -> str:
        return "upstream_refused"  # its own code is the upstream's to choose, without limit


def refusal(status: int, body: bytes) -> UpstreamRefused:
    """What an error body says, in whichever form: OpenAI's, Anthropic's, Ollama's, FastAPI's, or none."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = None
    error = said.get("error") or said.get("detail") or said if isinstance(said, dict) else said
    fields = error if isinstance(error, dict) else {"message": error}
    texts = {name: value for name, value in fields.items() if isinstance(value, str) and value}
    message = texts.get("message", f"The upstream answered with status {status}.")
    return UpstreamRefused(status, message, texts.get("type", "upstream_error"), texts.get("param"), texts.get("code"))


class UpstreamUnreachable(UpstreamError):
    code = "upstream_unreachable"


class UpstreamDisconnected(UpstreamError):
    code = "upstream_cut"


class UpstreamTimeout(UpstreamError):
    status = 504
    code = "upstream_timeout"


class DeadlineExceeded(UpstreamTimeout):
    pass


class NoUpstream(UpstreamError):
    """`retry_after` are the seconds after which it may be worth trying again."""

    status = 503
    code = "no_upstream"

    def __init__(self, message: str, *, retry_after: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


class TooManyRequests(NoUpstream):
    status = 429
    kind = "rate_limit_error"
    code = "upstream_busy"


class CacheUnavailable(GatewayError):
    status = 503
    code = "store_unavailable"


class NotCached(GatewayError):
    status = 504
    kind = "invalid_request_error"
    code = "not_cached"

    @property
    def headers(self) -> dict[str, str]:
        # No Cache-Status: it describes answers that come from elsewhere (RFC 9211, section 2).
        return {
            "x-keepgate-cache": "miss",
            "x-keepgate-layer": "none",
            "x-should-retry": "false",  # OpenAI's clients would try a 504 again
        }
