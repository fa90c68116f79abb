"""Errors as Anthropic's API tells them."""

import msgspec

from gateway.errors import GatewayError
from gateway.surfaces.messages.streams import event
from gateway.surfaces.surface import Json

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_encode = msgspec.json.Encoder().encode


def error_body(error: GatewayError) -> bytes:
    return _encode({"type": "error", "error": _described(error)})


def error_event(error: GatewayError) -> bytes:
    return event("error", error=_described(error))


def _described(error: GatewayError) -> Json:
    return {"type": _TYPES.get(error.status, "api_error"), "message": error.message}
