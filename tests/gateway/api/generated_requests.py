"""Requests that schemathesis generates from the OpenAPI document, sent to a running gateway.

    python -m tests.gateway.api.generated_requests 20000

sends that many in all, and ends with 1 if a response was wrong. A response is right if it has a documented status,
content type, headers and body, if it came in time, and if it is no fault of the gateway.
"""

import asyncio
import collections
import contextlib
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CheckContext, load_all_checks
from schemathesis.core.failures import FailureGroup
from schemathesis.core.transport import Response
from schemathesis.specs.openapi import checks

from gateway.api.openapi.operations import OPERATIONS
from gateway.processes.app import open_gateway
from gateway.settings.cache import CacheSettings
from gateway.settings.settings import Settings, TimeoutSettings
from gateway.upstreams.mock import MODEL, MockUpstream

DEADLINE = 10.0
"""Seconds that a response may take."""
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
_CHECKS = [checks.status_code_conformance, checks.content_type_conformance, checks.response_headers_conformance]


_NAMES = ("cache", "chat", "completions", "models", "prefix", "files", "messages", "responses", "audio", "..", ".", "")
"""Parts of paths that mean something to the gateway."""


def _settings(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


@dataclass(slots=True)
class Target:
    """A running gateway, the ids of what it keeps, and what has been seen of it."""

    url: str
    schema: Any
    session: requests.Session
    faults: "Faults"
    ids: dict[str, str] = field(default_factory=dict)
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)

    def fill(self) -> None:
        """Keep a file, a batch, a response and an entry, whose ids some requests name."""
        form = {"purpose": (None, "batch"), "file": ("in.jsonl", b'{"custom_id": "1"}')}
        file = self._made("/v1/files", files=form).json()["id"]
        batch = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        entry = self._made("/v1/chat/completions", json=CHAT)
        self.ids = {
            "files": file,
            "batches": self._made("/v1/batches", json=batch).json()["id"],
            "responses": self._made("/v1/responses", json={"model": MODEL, "input": "hello"}).json()["id"],
            "cache": entry.headers["x-keepgate-entry"],
            "keys": self._key(),
        }

    def _key(self) -> str:
        """The id of a key, which has a name of its own each time."""
        return str(self._made("/v1/keys", json={"name": f"key-{time.monotonic_ns()}"}).json()["id"])

    def _made(self, path: str, **sent: Any) -> requests.Response:
        answer = self.session.post(self.url + path, timeout=DEADLINE, **sent)
        answer.raise_for_status()
        return answer

    def send(self, method: str, path: str, mode: GenerationMode, count: int) -> int:
        """Send up to `count` generated requests, fewer if there are no more different ones; return how many.

        Raises what the first response that is wrong fails with, for the smallest such request.
        """
        sent = 0
        operation = self.schema[path][method]
        # The scripted upstream answers what no real one would, with as little sense.
        is_nonsense = mode == GenerationMode.NEGATIVE and OPERATIONS[method, path].passes_on
        bodies = [] if is_nonsense else [checks.response_schema_conformance]
        known = [MODEL, *([self.ids[path.split("/")[2]]] if "{id}" in path else [])]

        @_settings(count)
        @given(case=operation.as_strategy(generation_mode=mode), is_known=st.booleans())
        def check(case: schemathesis.Case[Any], is_known: bool) -> None:
            nonlocal sent
            if is_known:
                _name_what_is_there(case, known)
            self.faults.forget()
            response = case.call(base_url=self.url, session=self.session, timeout=DEADLINE)
            sent += 1
            self.statuses[f"{response.status_code}"] += 1
            case.validate_response(response, checks=[self._check_fault, *_CHECKS, *bodies])

        with contextlib.suppress(Unsatisfiable):
            check()
        return sent

    def send_elsewhere(self, count: int) -> int:
        """Send `count` requests to paths under /v1 that the document describes in words; return how many.

        Raises what the first response that is wrong fails with, for the smallest such request.
        """

        @_settings(count)
        @given(
            method=st.sampled_from(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")),
            names=st.lists(st.sampled_from(_NAMES) | st.text(min_size=1, max_size=8), min_size=1, max_size=4),
            body=st.none() | st.binary(max_size=64) | st.just(msgspec.json.encode(CHAT)),
            content_type=st.sampled_from(("application/json", "multipart/form-data; boundary=x", "text/plain", "")),
        )
        def check(method: str, names: list[str], body: bytes | None, content_type: str) -> None:
            self.faults.forget()
            path = "/v1/" + "/".join(quote(name.encode("utf-8", "surrogatepass"), safe="") for name in names)
            response = self.session.request(
                method, self.url + path, data=body, headers={"Content-Type": content_type}, timeout=DEADLINE
            )
            self.statuses[f"{response.status_code}"] += 1
            self._check(response.status_code, response.text)

        check()
        return count

    def _check_fault(self, context: CheckContext, response: Response, case: schemathesis.Case[Any]) -> None:
        self._check(response.status_code, response.text or "")

    def _check(self, status: int, said: str) -> None:
        """The gateway has not failed, and an upstream is only blamed where it has."""
        assert not self.faults.of_gateway, self.faults.of_gateway
        is_own = status >= 500 and not self.faults.of_upstream
        assert not is_own or "only-if-cached" in said, f"{status} without a fault of the upstream: {said}"


def _name_what_is_there(case: schemathesis.Case[Any], known: list[str]) -> None:
    """The model that the upstream has and the object that was made before, for what would not get far without."""
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = known[0]
    if "id" in (case.path_parameters or {}) and len(known) > 1:
        case.path_parameters["id"] = known[1]


class Faults(logging.Handler):
    """What the gateway and the scripted upstream log about exceptions that nobody expected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.forget()

    def forget(self) -> None:
        self.of_gateway: list[str] = []
        self.of_upstream: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        of = self.of_upstream if record.name == "aiohttp.server" else self.of_gateway
        of.append(logging.Formatter().format(record))


@contextlib.contextmanager
def running() -> Iterator[Target]:
    """A gateway with a scripted upstream, in a thread of its own."""
    faults = Faults()
    url: Future[str] = Future()
    end = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve(state: str) -> None:
        async with MockUpstream().serving() as upstream:
            ends = TimeoutSettings(shutdown=0.5)
            cache = CacheSettings(redis_deadline=2.0)  # a busy machine is no fault of the gateway
            own = Settings(
                port=0, redis="embedded", state_dir=state, upstreams=(upstream.url,), timeouts=ends, cache=cache
            )
            async with open_gateway(own) as gateway:
                url.set_result(gateway.url)
                await end.wait()

    root = logging.getLogger()
    root.addHandler(faults)
    with tempfile.TemporaryDirectory() as state, requests.Session() as session:
        thread = threading.Thread(target=lambda: loop.run_until_complete(serve(state)), daemon=True)
        thread.start()
        try:
            address = url.result(DEADLINE)
            described = session.get(address + "/openapi.json", timeout=DEADLINE).json()
            target = Target(address, schemathesis.openapi.from_dict(described), session, faults)
            target.fill()
            yield target
        finally:
            loop.call_soon_threadsafe(end.set)
            thread.join(DEADLINE)
            loop.close()
            root.removeHandler(faults)


def main(count: int) -> int:
    """Send `count` requests, to all operations in turn; print what was wrong."""
    sent, wrong = 0, 0
    with running() as target:
        each = max(1, count // (2 * len(OPERATIONS)))
        senders: list[tuple[str, Callable[[int], int]]] = [("elsewhere", target.send_elsewhere)]
        senders += [
            (f"{method} {path} ({mode.name})", partial(target.send, method, path, mode))
            for method, path in OPERATIONS
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        ]
        while sent < count:
            target.fill()
            for name, send in list(senders):
                asked = min(each, count - sent)
                if not asked:
                    break
                try:
                    given = send(asked)
                except (Exception, FailureGroup) as error:  # noqa: BLE001  # it is printed, and the rest is tried
                    print(f"WRONG {name}\n{type(error).__name__}: {error}", flush=True)
                    wrong += 1
                    given = asked
                sent += given
                if not given:  # there is no wrong request for what has no parameters
                    senders.remove((name, send))
        statuses = dict(sorted(target.statuses.items()))
    print(f"{sent} requests for {len(OPERATIONS)} operations; by status: {statuses}; {wrong} wrong")
    return 1 if wrong else 0


load_all_checks()

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
