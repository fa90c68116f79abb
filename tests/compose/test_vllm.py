"""The profile `vllm-cpu` of compose.yaml on a real Docker engine: two vLLMs that share what they have prefilled."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compose import build_context
from tests.compose.engine import Engine
from tests.compose.stack import Stack, until
from tests.prefix_store.connectors.vllm_server.models import smollm2

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

GATEWAY = "gateway-vllm-cpu"
ENGINES = ("vllm-cpu-1", "vllm-cpu-2")
MODEL = "/home/keepgate/.cache/SmolLM2"
HEALTHY_WITHIN = 300.0  # seconds, on two cores that build and start other things
SEEN_WITHIN = 60.0  # seconds
STORE = (
    "import socket, json; names = {i[4][0] for i in socket.getaddrinfo(socket.gethostname(), 8000)}; "
    "own = socket.gethostbyname(socket.gethostname() + '.store'); "
    "is_open = lambda host: socket.socket().connect_ex((host, 8090)) == 0; "
    "print(json.dumps([is_open(own), [host for host in names - {own} if is_open(host)], is_open('127.0.0.1')]))"
)


@pytest.fixture(scope="module")
def stack(docker: Engine, context: Path) -> Iterator[Stack]:
    """Built from this checkout and running, with the small model in place of one from a hub."""
    build_context.gather(context, build_context.VLLM_PINS)
    shutil.copytree(smollm2(), context / "model")
    stack = Stack(docker, context, f"keepgate-vllm-{os.getpid()}", profile="vllm-cpu")
    variables = {"KEEPGATE_MODEL": MODEL}
    try:
        print("Building the images with vLLM ...", flush=True)
        began = time.monotonic()
        stack.compose("build", "prepare", GATEWAY, *ENGINES)
        print(f"Built in {time.monotonic() - began:.0f} s. Starting the services ...", flush=True)
        began = time.monotonic()
        bind = f"{context / 'model'}:/model:ro"
        stack.compose("run", "--rm", "-T", "-v", bind, "prepare", "cp", "-r", "/model", MODEL)
        for services in (ENGINES, (GATEWAY,)):
            stack.compose("up", "-d", *services, variables=variables)
            for service in services:
                stack.wait_healthy(service, HEALTHY_WITHIN)
        print(f"Ready after {time.monotonic() - began:.0f} s.", flush=True)
        yield stack
    finally:
        stack.compose("down", "--volumes", "--rmi", "local", "--remove-orphans")


def chat(stack: Stack, about: str, question: str, key: str = "sk-one") -> dict[str, Any]:
    """Ask anew about a long text: the usage of the answer."""
    text = f"About {about}: " + " ".join(f"{about} number {number} is in the shed." for number in range(60))
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": text}, {"role": "user", "content": question}],
        "max_tokens": 8,
        "temperature": 0,
    }
    reply = stack.post(body, **{"Cache-Control": "no-cache", "Authorization": f"Bearer {key}"})
    assert reply.status == 200, (reply, stack.logs(GATEWAY))
    usage: dict[str, Any] = json.loads(reply.body)["usage"]
    return usage


def found(usage: dict[str, Any]) -> float:
    """The share of a prompt that was not prefilled."""
    return float((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0) / int(usage["prompt_tokens"])


def metric(stack: Stack, engine: str, name: str) -> float:
    """The sum of an engine's series of a figure, since its start."""
    look = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
    lines = stack.execute(engine, "python", "-c", look).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def restored(stack: Stack, engine: str) -> float:
    """The tokens that an engine has restored."""
    return metric(stack, engine, "keepgate_prefix_restored_tokens_total")


def test_chats_are_answered_and_a_prompt_is_prefilled_once(stack: Stack) -> None:
    """By the engine that has its blocks, for the tenant who has sent it."""
    first = chat(stack, "spade", "Where is it?")
    assert found(first) < 0.5
    second = chat(stack, "spade", "What is in the shed?")
    assert found(second) > 0.8, second
    of_another = chat(stack, "spade", "What is in the shed?", key="sk-other")
    assert found(of_another) < 0.5, of_another


def test_operators_see_both_stores(stack: Stack) -> None:
    """Through the gateway, which knows by events what each engine holds in its own memory."""
    chat(stack, "lamp", "Where is it?")
    key = {"X-Keepgate-Admin-Key": stack.admin_key(GATEWAY)}

    def holds() -> list[int]:
        routing = json.loads(stack.send("GET", "/v1/routing", None, key).body)
        return [upstream["kv_blocks"] for upstream in routing["upstreams"]]

    until(lambda: sum(holds()) > 0, SEEN_WITHIN, lambda: stack.logs(GATEWAY))
    said = stack.execute(GATEWAY, "keepgate", "prefix", "stats")
    assert "disk" in said, said
    assert "memory" in said, said


def test_the_store_is_out_of_reach_of_apps(stack: Stack) -> None:
    """It listens in the network of Redis, and nowhere else."""
    for engine in ENGINES:
        assert json.loads(stack.execute(engine, "python", "-c", STORE)) == [True, [], False]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_has_no_rights(stack: Stack, engine: str) -> None:
    """It is no root and cannot write outside its volumes; the secret is for its user alone."""
    assert stack.execute(engine, "id", "-u").strip() == "10001"
    tried = "for place in / /etc /usr /home /opt ~; do touch $place/x && echo $place; done 2> /dev/null; true"
    assert stack.execute(engine, "sh", "-c", tried).split() == []
    assert stack.execute(engine, "sh", "-c", "stat -c %a ~/prefixes ~/prefixes/secret").split() == ["700", "600"]


def test_after_a_restart_a_chat_is_not_prefilled_again(stack: Stack) -> None:
    """Both engines are restarted: what is found comes from the folder."""
    chat(stack, "rake", "Where is it?")
    stack.compose("restart", *ENGINES)
    for engine in ENGINES:
        stack.wait_healthy(engine, HEALTHY_WITHIN)
    stack.wait_healthy(GATEWAY, HEALTHY_WITHIN)
    usage = chat(stack, "rake", "What is in the shed?")
    assert found(usage) > 0.8, usage
    assert sum(restored(stack, engine) for engine in ENGINES) > 0.8 * usage["prompt_tokens"]


def test_a_killed_engine_leaves_its_blocks_to_the_other(stack: Stack) -> None:
    """While it is away its chats go on there, without a new prefill; then it is back."""
    before = {engine: metric(stack, engine, "vllm:prompt_tokens_total") for engine in ENGINES}
    chat(stack, "hose", "Where is it?")
    (killed,) = (engine for engine in ENGINES if metric(stack, engine, "vllm:prompt_tokens_total") > before[engine])
    (other,) = set(ENGINES) - {killed}
    had = restored(stack, other)
    stack.crash(killed)
    usage = chat(stack, "hose", "What is in the shed?")
    assert found(usage) > 0.8, usage
    assert restored(stack, other) - had > 0.8 * usage["prompt_tokens"]
    stack.wait_healthy(killed, HEALTHY_WITHIN)
