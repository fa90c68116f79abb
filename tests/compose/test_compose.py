"""compose.yaml on a real Docker engine. ``make test-compose`` runs this; ``make test`` does not."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.compose import base_images, build_context
from tests.compose.engine import Engine, engine, run

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

IMAGES = ("backend", "gateway", "gateway-semantic")
HEALTHY_WITHIN = 60  # seconds, for the gateway once all that it waits for is healthy
EMBEDDING_WITHIN = 180  # seconds, for the embedding model to be exported and compiled at its first start
STORE_WELL_WITHIN = 10  # seconds, for the store to answer in time on a machine that is busy starting containers
WRITTEN_TWICE = ("Name one animal.", "name one animal")
QUESTION = {"messages": [{"role": "user", "content": "Name one colour."}], "max_tokens": 8, "temperature": 0}


@dataclass
class Reply:
    """An answer of the gateway, whole. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Composed:
    """The services of compose.yaml under a project name of their own, and the gateway's port on this machine."""

    engine: Engine
    folder: Path
    project: str
    port: int

    def compose(self, *arguments: str) -> str:
        """Run docker compose on the project, Compose v2 where the docker command has it."""
        command = ["docker", "compose"] if self._has_v2() else ["docker-compose"]
        variables = {**self.engine.variables, "KEEPGATE_PORT": str(self.port), "PIP_NO_INDEX": "1"}
        return run(*command, "-p", self.project, *arguments, variables=variables, cwd=self.folder)

    def up(self, gateway: str = "gateway") -> None:
        """Start a gateway and all that it needs, and return once it is healthy."""
        began = str(int(time.time()))
        self.compose("--profile", "semantic", "up", "-d", gateway)
        # Told from when it began, so none is missed; and for no longer than it may take.
        until = ("--since", began, "--until", str(int(time.time()) + HEALTHY_WITHIN), "--filter", "event=health_status")
        command = ["docker", "events", *until, "--filter", f"container={self.container(gateway)}"]
        variables = {**os.environ, **self.engine.variables}
        with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as events:
            assert events.stdout is not None
            healthy = any("health_status: healthy" in line for line in events.stdout)
            events.terminate()
        assert healthy, self.compose("logs", "--tail", "50")

    def container(self, service: str) -> str:
        """Return the id of a service's container."""
        return self.compose("--profile", "semantic", "ps", "-q", service).strip()

    def inspect(self, what: str, path: str) -> str:
        """Return one field of a container or an image."""
        return self.engine.docker("inspect", "--format", "{{" + path + "}}", what).strip()

    def post(self, body: dict[str, Any], **headers: str) -> Reply:
        """Send one chat request, as a client outside would."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            sent = {"Content-Type": "application/json", **headers}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), sent)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def model(self) -> str:
        """Return the id of the model that the gateway lists."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", "/v1/models")
            listing = json.loads(connection.getresponse().read())
            return str(listing["data"][0]["id"])

    def _has_v2(self) -> bool:
        try:
            self.engine.docker("compose", "version")
        except subprocess.CalledProcessError:
            return False
        return True


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    """Everything built from this checkout and running; nothing of it is left afterwards, also when it is stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = build_context.prepare(tmp_path_factory.mktemp("context"))
    with engine() as docker:
        base_images.provide(docker)
        composed = Composed(docker, folder, f"keepgate-test-{os.getpid()}", free_port())
        try:
            print("Building the images ...", flush=True)
            composed.compose("--profile", "semantic", "build", *IMAGES)
            print("Starting the services ...", flush=True)
            composed.up()
            yield composed
        finally:
            composed.compose("--profile", "semantic", "down", "--volumes", "--rmi", "local", "--remove-orphans")
            shutil.rmtree(folder, ignore_errors=True)


def test_an_answer_outlives_down_and_up(composed: Composed) -> None:
    """The second time an answer comes from the cache, streamed or not, and also after every container is gone."""
    question = {"model": composed.model(), **QUESTION}
    first = composed.post(question)
    assert (first.status, first.headers["x-keepgate-cache"]) == (200, "miss"), first
    second = composed.post(question)
    assert (second.status, second.headers["x-keepgate-cache"]) == (200, "hit"), second
    assert json.loads(second.body)["choices"] == json.loads(first.body)["choices"]

    before = composed.container("gateway")
    composed.compose("down")
    composed.up()
    assert composed.container("gateway") != before

    # Redis has 20 ms for an answer, which on a busy machine it may miss, and then the gateway goes on without it.
    given_up = time.monotonic() + STORE_WELL_WITHIN
    while (third := composed.post(question, **{"Cache-Control": "only-if-cached"})).status == 504:
        assert time.monotonic() < given_up, (third, composed.compose("logs", "gateway"))
    assert (third.status, third.headers["x-keepgate-cache"]) == (200, "hit"), third
    assert third.headers["x-keepgate-layer"] == "exact"
    assert json.loads(third.body)["choices"] == json.loads(first.body)["choices"]
    streamed = composed.post({**question, "stream": True})
    assert (streamed.status, streamed.headers["x-keepgate-cache"]) == (200, "hit"), streamed
    assert streamed.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("service", ["gateway", "backend"])
def test_services_do_not_run_as_root(composed: Composed, service: str) -> None:
    """Neither image runs its command as root, nor carries pip or the code of the tests."""
    container = composed.container(service)
    assert composed.engine.docker("exec", container, "id", "-u").strip() == "10001"
    look = "import importlib.util as u; print([n for n in ('pip', 'tests', 'benchmarks', 'pytest') if u.find_spec(n)])"
    assert composed.engine.docker("exec", container, "/opt/keepgate/bin/python", "-c", look).strip() == "[]"


def test_gateway_image_is_small(composed: Composed) -> None:
    """The gateway's image has no torch, and adds less than 100 MB to its base."""
    image = composed.inspect(composed.container("gateway"), ".Image")
    added = int(composed.inspect(image, ".Size")) - int(composed.inspect(base_images.PYTHON, ".Size"))
    assert added < 100 * 10**6
    look = "import importlib.util as u; print(u.find_spec('torch'))"
    container = composed.container("gateway")
    assert composed.engine.docker("exec", container, "/opt/keepgate/bin/python", "-c", look).strip() == "None"


def test_backend_can_build_its_kernels(composed: Composed) -> None:
    """The image carries the compiler, and its user may write where the result is kept."""
    build = "echo 'int main() {}' | g++ -march=native -fopenmp -x c++ -o ~/.cache/probe - && ~/.cache/probe"
    composed.engine.docker("exec", composed.container("backend"), "sh", "-c", build)


def test_data_lies_in_volumes(composed: Composed) -> None:
    """Redis keeps its file, and the backend its converted model and its prefixes, where ``down`` leaves them."""
    for service, place in (
        ("redis", "/data"),
        ("backend", "/home/keepgate/.cache"),
        ("backend", "/home/keepgate/prefixes"),
    ):
        mounts = json.loads(composed.inspect(composed.container(service), "json .Mounts"))
        assert {"volume"} == {mount["Type"] for mount in mounts if mount["Destination"] == place}
    assert "yes" in composed.engine.docker(
        "exec", composed.container("redis"), "redis-cli", "config", "get", "appendonly"
    )


def test_the_backend_keeps_what_it_prefilled(composed: Composed) -> None:
    """Its user may write to the volume; the blocks are there, and the secret is for nobody else to read."""
    content = "Count these stars:" + " star" * 100
    question = {"model": composed.model(), **QUESTION, "messages": [{"role": "user", "content": content}]}
    for _ in range(2):
        answer = composed.post(question, **{"Cache-Control": "no-cache"})
        assert answer.status == 200, answer
    assert int(answer.headers["x-keepgate-prefix-tokens"]) > 80, answer
    look = "stat -c %a ~/prefixes ~/prefixes/secret && ls ~/prefixes/blocks/identity"
    said = composed.engine.docker("exec", composed.container("backend"), "sh", "-c", look).split()
    assert said == ["700", "600", "/home/keepgate/prefixes/blocks/identity"], composed.compose("logs", "backend")


def test_the_semantic_gateway_knows_a_question_however_it_is_written(
    composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its image has all that the semantic cache needs, and its user may keep the compiled model where it is kept."""
    monkeypatch.setenv("KEEPGATE_SEMANTIC_MODE", "on")
    composed.compose("stop", "gateway")  # both publish the same port
    composed.up("gateway-semantic")
    container = composed.container("gateway-semantic")
    assert composed.engine.docker("exec", container, "id", "-u").strip() == "10001"

    asked, written = ({**QUESTION, "messages": [{"role": "user", "content": text}]} for text in WRITTEN_TWICE)
    asked["model"] = written["model"] = composed.model()
    assert composed.post(asked).status == 200
    given_up = time.monotonic() + EMBEDDING_WITHIN
    while (other := composed.post(written, **{"Cache-Control": "only-if-cached"})).status == 504:
        assert time.monotonic() < given_up, composed.compose("logs", "--tail", "50", "gateway-semantic")
        time.sleep(0.5)
    assert (other.status, other.headers["x-keepgate-layer"]) == (200, "normalized"), other
    log = composed.compose("logs", "gateway-semantic")
    assert "computed by" not in log, log  # which it says of every encoder but the compiled one
