"""compose.yaml on a real Docker engine: services are killed or stopped; what is answered meanwhile, and afterwards."""

import json
from typing import Any

import pytest

from tests.compose.stack import SERVICES, Stack, until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

ANSWERED_WITHIN = 120.0  # seconds after a service has been killed
ONLY_CACHED = {"Cache-Control": "only-if-cached"}


def question(stack: Stack, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": stack.model(), "messages": messages, "max_tokens": 8, "temperature": 0}


def text_of(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["message"]["content"])


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_service_comes_back(stack: Stack, service: str) -> None:
    """By itself; an answer from before is still a hit, and a new question is answered."""
    known = question(stack, f"Name one colour, before {service}.")
    answered = stack.post(known)
    assert answered.status == 200, answered
    stack.crash(service)
    stack.wait_healthy(service, ANSWERED_WITHIN)
    assert int(stack.inspect(stack.container(service), ".RestartCount")) > 0
    stack.wait_healthy("gateway", ANSWERED_WITHIN)

    def is_hit() -> bool:
        reply = stack.post(known, **ONLY_CACHED)
        return reply.status == 200 and text_of(reply.body) == text_of(answered.body)

    until(is_hit, ANSWERED_WITHIN, lambda: stack.logs("gateway"))
    fresh = question(stack, f"Name one colour, after {service}.")
    until(lambda: stack.post(fresh).status == 200, ANSWERED_WITHIN, lambda: stack.logs("gateway"))


@pytest.mark.parametrize("service", ["redis", "backend"])
def test_answers_are_there_while_a_service_is_away(stack: Stack, service: str) -> None:
    """From memory while Redis is away, which costs no request either; without the engine all that is stored."""
    known = question(stack, f"Name one animal, without {service}.")
    assert stack.post(known).status == 200
    assert stack.post(known).headers["x-keepgate-cache"] == "hit"
    stack.compose("stop", service)
    try:
        reply = stack.post(known)
        assert (reply.status, reply.headers["x-keepgate-cache"]) == (200, "hit"), reply
        other = stack.post({**known, "messages": [{"role": "user", "content": f"Name another, without {service}."}]})
        assert other.status in ((200,) if service == "redis" else (502, 503)), other
    finally:
        stack.up(service)


def test_answers_given_without_redis_are_stored_when_it_is_back(stack: Stack) -> None:
    """They have waited, and another gateway process finds them."""
    stack.compose("stop", "redis")
    asked = question(stack, "Name one river.")
    try:
        assert stack.post(asked).status == 200
    finally:
        stack.up("redis")

    def has_redis() -> bool:
        return "keepgate_redis_available 1.0" in stack.send("GET", "/metrics").body.decode()

    until(has_redis, ANSWERED_WITHIN, lambda: stack.logs("gateway"))
    # Stopped in order, it writes what waits.
    stack.compose("restart", "gateway")
    stack.wait_healthy("gateway", ANSWERED_WITHIN)
    until(lambda: stack.post(asked, **ONLY_CACHED).status == 200, 10.0, lambda: stack.logs("gateway"))
