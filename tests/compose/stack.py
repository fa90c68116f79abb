"""The services of compose.yaml on a Docker engine, as an operator and a client see them."""

import http.client
import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compose.engine import Engine, run
from tests.compose.monitoring import free_port

HEALTHY_WITHIN = 120.0  # seconds, for a service once all that it waits for is healthy
POLL = 0.3  # seconds
SERVICES = ("redis", "backend", "gateway", "prometheus", "disks")
"""What runs without a profile, but for Grafana, whose image is on a hub alone."""


@dataclass
class Reply:
    """An answer of the gateway, whole. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def until(condition: Callable[[], bool], within: float, said: Callable[[], str]) -> None:
    """Return once the condition holds: containers are asked, and send no event for it. Raises AssertionError."""
    given_up = time.monotonic() + within
    while not condition():
        assert time.monotonic() < given_up, said()
        time.sleep(POLL)


@dataclass
class Stack:
    """The services of compose.yaml under a project name of their own, and their ports on this machine."""

    engine: Engine
    folder: Path
    project: str
    profile: str = "semantic"
    port: int = field(default_factory=free_port)
    prometheus_port: int = field(default_factory=free_port)
    first_answer_after: float = 0.0
    """Seconds from the first ``up``, with all images built and all volumes empty, to the first answer."""

    def compose(self, *arguments: str, variables: dict[str, str] | None = None) -> str:
        """Run docker compose on the project, Compose v2 where the docker command has it."""
        command = ["docker", "compose"] if self._has_v2() else ["docker-compose"]
        ports = {"KEEPGATE_PORT": str(self.port), "KEEPGATE_PROMETHEUS_PORT": str(self.prometheus_port)}
        given = {**self.engine.variables, **ports, "PIP_NO_INDEX": "1", **(variables or {})}
        named = ("-p", self.project, "--profile", self.profile)
        return run(*command, *named, *arguments, variables=given, cwd=self.folder)

    def up(self, *services: str, variables: dict[str, str] | None = None) -> None:
        """Start services and all that they need, and return once they are healthy."""
        self.compose("up", "-d", *(services or SERVICES), variables=variables)
        for service in services or SERVICES:
            self.wait_healthy(service)

    def wait_healthy(self, service: str, within: float = HEALTHY_WITHIN) -> None:
        """Return once a service says that it is well."""
        until(lambda: self.health(service) == "healthy", within, lambda: self.logs(service))

    def healthy(self) -> set[str]:
        """The services that say that they are well."""
        own = ("--filter", f"label=com.docker.compose.project={self.project}", "--filter", "health=healthy")
        return set(self.engine.docker("ps", *own, "--format", '{{.Label "com.docker.compose.service"}}').split())

    def health(self, service: str) -> str:
        """``starting``, ``healthy`` or ``unhealthy``; nothing where there is no container."""
        try:
            return self.inspect(self.container(service), ".State.Health.Status")
        except subprocess.CalledProcessError:
            return ""

    def logs(self, service: str) -> str:
        """The last lines of a service."""
        return f"{service} is {self.health(service)}:\n{self.compose('logs', '--tail', '50', service)}"

    def container(self, service: str) -> str:
        """Return the id of a service's container."""
        return self.compose("ps", "-q", service).strip()

    def inspect(self, what: str, path: str) -> str:
        """Return one field of a container or an image."""
        return self.engine.docker("inspect", "--format", "{{" + path + "}}", what).strip()

    def execute(self, service: str, *command: str) -> str:
        """Run a command in the container of a service, as its user, and return its stdout."""
        return self.engine.docker("exec", self.container(service), *command)

    def crash(self, service: str) -> None:
        """Kill the process of a service, as the kernel does when memory is short, and return once it is gone.

        ``docker kill`` would count as a stop that somebody wants, after which nothing is started again.
        """
        container = self.container(service)
        before = self.inspect(container, ".State.StartedAt")
        process = self.inspect(container, ".State.Pid")
        if os.geteuid() == 0 and self.engine.private:
            os.kill(int(process), 9)
        else:
            helper = ("run", "--rm", "--pid=host", "--privileged", "--user=0", "--entrypoint=kill")
            self.engine.docker(*helper, self.inspect(container, ".Image"), "-9", process)
        until(lambda: self.inspect(container, ".State.StartedAt") != before, 60.0, lambda: self.logs(service))

    def post(self, body: dict[str, Any], **headers: str) -> Reply:
        """Send one chat request, as a client outside would."""
        return self.send(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json", **headers}
        )

    def send(self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None) -> Reply:
        """Send any request to the gateway."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def model(self) -> str:
        """Return the id of the model that the gateway lists."""
        return str(json.loads(self.send("GET", "/v1/models").body)["data"][0]["id"])

    def admin_key(self, gateway: str = "gateway") -> str:
        """The key that `prepare` has made."""
        return self.execute(gateway, "cat", "/run/keepgate/secrets/admin_key").strip()

    def _has_v2(self) -> bool:
        try:
            self.engine.docker("compose", "version")
        except subprocess.CalledProcessError:
            return False
        return True
