"""Errors are told as clients of Anthropic's API expect them."""

import json

import pytest

from gateway.errors import (
    AdminForbidden,
    AdminKeyRequired,
    BodyTooLarge,
    GatewayError,
    InternalError,
    InvalidRequest,
    NotFound,
    NoUpstream,
    UpstreamDisconnected,
    UpstreamTimeout,
)
from gateway.surfaces.messages.surface import MessagesSurface

SURFACE = MessagesSurface()


def with_status(status: int) -> GatewayError:
    error = GatewayError("x")
    error.status = status
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("x"), "invalid_request_error"),
        (AdminKeyRequired("x"), "authentication_error"),
        (AdminForbidden("x"), "permission_error"),
        (NotFound("x"), "not_found_error"),
        (BodyTooLarge("x"), "request_too_large"),
        (with_status(429), "rate_limit_error"),
        (InternalError("x"), "api_error"),
        (UpstreamDisconnected("x"), "api_error"),
        (NoUpstream("x"), "overloaded_error"),
        (with_status(529), "overloaded_error"),
        (UpstreamTimeout("x"), "timeout_error"),
    ],
)
def test_an_error_has_the_type_of_its_status(error: GatewayError, kind: str) -> None:
    """The type follows from the status, in a response and in a stream."""
    said = {"type": "error", "error": {"type": kind, "message": "x"}}
    assert json.loads(SURFACE.error_body(error)) == said
    name, data, *rest = SURFACE.error_event(error).decode().split("\n")
    assert (name, rest) == ("event: error", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == said
