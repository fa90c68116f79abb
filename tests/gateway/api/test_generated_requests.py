"""Requests that are generated from the OpenAPI document; generated_requests.py sends many more of them."""

from collections.abc import Iterator

import pytest
from schemathesis import GenerationMode

from gateway.api.openapi.operations import OPERATIONS
from tests.gateway.api.generated_requests import Target, running

EXAMPLES = 5


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with running() as target:
        yield target


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_generated_requests_are_answered_as_documented(target: Target, method: str, path: str) -> None:
    """Whatever a request has, the response is a documented one, in time, and no fault of the gateway."""
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        target.send(method, path, mode, EXAMPLES)


def test_requests_elsewhere_are_no_fault_of_the_gateway(target: Target) -> None:
    """A request to any other path under /v1 is relayed or refused."""
    target.send_elsewhere(10 * EXAMPLES)
