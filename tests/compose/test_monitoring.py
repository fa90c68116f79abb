"""The dashboards and alerts of compose.yaml: their files, and their queries on a real Prometheus, which asks a real
gateway and a real engine.
"""

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from backend.api.metrics import Metrics
from backend.engine.stats import EngineStats
from gateway import metrics
from prefix_store.store.metrics import store_metrics
from prefix_store.store.store import PrefixStore
from scripts.reference import backend_metrics
from tests.compose.monitoring import (
    GRAFANA,
    PROMETHEUS,
    ROOT,
    Panel,
    Prometheus,
    dashboards,
    free_port,
    missing_program,
    panels,
    prometheus,
    rules,
)
from tests.waiting import until

needs_prometheus = pytest.mark.skipif(bool(missing_program()), reason=missing_program() or "it is there")
SCRAPES_WITHIN = 30.0
ENGINE_WITHIN = 120.0
ROUNDS = 4
ADMIN_KEY = "operator"
SUFFIX = re.compile(r"_(bucket|count|sum)$")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)


@needs_prometheus
def test_prometheus_accepts_its_configuration() -> None:
    """And with it the rules."""
    done = run("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_alerts_fire_when_they_should_and_not_before() -> None:
    """As tests.yml says of series of figures."""
    done = run("promtool", "test", "rules", PROMETHEUS / "tests.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_and_has_a_runbook() -> None:
    """It is seen to fire; it says what it means and, in steps, what to do."""
    tests = yaml.safe_load((PROMETHEUS / "tests.yml").read_text(encoding="utf-8"))["tests"]
    samples = [sample for test in tests for each in test["promql_expr_test"] for sample in each["exp_samples"]]
    fired = {re.findall(r'alertname="(\w+)"', sample["labels"])[0] for sample in samples}
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    assert fired == set(names)
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "for" in rule


def known_metrics() -> set[str]:
    """The names under which gateway and engine show their figures."""
    counted = [field for field in dataclasses.fields(EngineStats) if field.default_factory is dataclasses.MISSING]
    zeros: dict[str, Any] = dict.fromkeys((field.name for field in counted), 0)
    families = [*metrics.registry.collect(), *Metrics(EngineStats(**zeros)).registry.collect()]
    assert "keepgate_backend_running_sequences" in backend_metrics()
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    stored = [figure.name for figure in store_metrics(PrefixStore({}), block_size=16)]
    return names | {f"keepgate_backend_prefix_{name}" for name in (*stored, "fetch_timeouts")}


@pytest.mark.parametrize("text", [*(q for panel in panels() for q in panel.queries), *(r["expr"] for r in rules())])
def test_a_query_asks_for_figures_that_there_are(text: str) -> None:
    """Under names that gateway and engine use."""
    asked = {SUFFIX.sub("", name) for name in re.findall(r"\bkeepgate_\w+", text)}
    known = known_metrics()
    missing = {name for name in asked - known if name.removesuffix("_total") not in known or "prefix" not in name}
    assert missing == set()


@pytest.mark.parametrize("name", dashboards())
def test_a_dashboard_can_be_provisioned(name: str) -> None:
    """It is called as its file is, its panels do not overlap, and each says what it shows, and asks the one source."""
    dashboard = dashboards()[name]
    assert dashboard["uid"] == name
    assert "id" not in dashboard
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            for target in panel["targets"]:
                assert target["datasource"] == {"type": "prometheus", "uid": source["uid"]}


def test_grafana_finds_the_dashboards_where_compose_puts_them() -> None:
    """And one of them is its home."""
    service = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["grafana"]
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/keepgate.yml").read_text())["providers"][0]
    path = provider["options"]["path"]
    assert f"./deploy/grafana/dashboards:{path}:ro" in service["volumes"]
    home = Path(service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == path
    assert home.stem in dashboards()


SCRIPT = """\
replies:
  - {when: uncacheable, text: "As you like.", headers: {Cache-Control: no-store}}
  - when: remembered
    body:
      id: x
      object: chat.completion
      model: mock
      choices: [{index: 0, message: {role: assistant, content: "Yes."}, finish_reason: stop}]
      usage: {prompt_tokens: 100, completion_tokens: 2, total_tokens: 102, prompt_tokens_details: {cached_tokens: 64}}
  - {}
"""


@asynccontextmanager
async def running(log: Path, *command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of this checkout, stopped at the end."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KEEPGATE_")}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, cwd=ROOT, env=plain, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def answers(process: asyncio.subprocess.Process, log: Path, session: aiohttp.ClientSession, url: str) -> None:
    """Return when GET `url` is answered with 200."""

    async def is_ready() -> bool:
        assert process.returncode is None, log.read_text()  # noqa: ASYNC240  # the test is over
        try:
            async with session.get(url) as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    await until(is_ready, ENGINE_WITHIN, 0.1)


class Gateway:
    """A client of the gateway at `url`."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def send(self, method: str, path: str, body: dict[str, Any] | None, key: str) -> tuple[int, Any]:
        """The status and the JSON of an answer. `key` is a client's, or the operator's."""
        headers = {"X-Keepgate-Admin-Key": key} if key == ADMIN_KEY else {"Authorization": f"Bearer {key}"}
        async with self._session.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def ask(self, model: str, text: str, key: str) -> int:
        """The status of a chat."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        return (await self.send("POST", "/v1/chat/completions", body, key))[0]


async def one_round(gateway: Gateway, number: int, key: str, limited: str) -> None:
    """Traffic of every kind that the dashboards show."""
    for text in (f"question {number}", "question", "question"):
        assert await gateway.ask("mock", text, key) == 200
    long = " ".join(["The same long beginning of a prompt."] * 12)
    assert await gateway.ask("SmolLM2-135M-Instruct", f"{long} Number {number}?", key) == 200
    assert await gateway.ask("SmolLM2-135M-Instruct", long, key) == 200
    same = [gateway.ask("SmolLM2-135M-Instruct", f"{long} Shared {number}?", key) for _ in range(2)]
    assert await asyncio.gather(*same) == [200, 200]
    assert await gateway.ask("mock", f"uncacheable {number}", key) == 200
    assert await gateway.ask("mock", f"remembered {number}", key) == 200
    assert await gateway.ask("away", f"question {number}", key) in (502, 503)  # left alone after a while
    assert await gateway.ask("mock", f"limited {number}", limited) == (200 if number == 0 else 429)
    embedding = {"model": "SmolLM2-135M-Instruct", "input": [f"text {number}", "text"]}
    assert (await gateway.send("POST", "/v1/embeddings", embedding, key))[0] == 200


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus that has watched a gateway, an engine with a prefix store and upstreams that fail, under traffic."""
    engine_port, gateway_port = free_port(), free_port()
    (tmp_path / "mock.yaml").write_text(SCRIPT)
    settings = {
        "port": gateway_port,
        "state_dir": str(tmp_path / "state"),
        "admin_key": ADMIN_KEY,
        "upstreams": [
            {"url": f"http://127.0.0.1:{engine_port}/v1", "name": "engine", "price_per_hour": 1.5},
            {"url": f"mock:{tmp_path / 'mock.yaml'}", "name": "hosted"},
            {"url": "http://127.0.0.1:9/v1", "name": "gone", "models": {"away": "away"}},
        ],
        "routing": {"models": {"away": {"upstreams": ["gone"]}}},
        "keys": {"required": True},
        "costs": {"prices": {"mock": {"input": 1.0, "output": 2.0}}},
    }
    (tmp_path / "keepgate.yaml").write_text(yaml.safe_dump(settings))
    engine_log, gateway_log = tmp_path / "engine.log", tmp_path / "gateway.log"
    engine_words = ("backend", "--port", str(engine_port), "--prefix-disk", str(tmp_path / "blocks"))
    gateway_words = ("gateway", "serve", "--config", str(tmp_path / "keepgate.yaml"))
    url = f"http://127.0.0.1:{gateway_port}"
    async with (
        running(engine_log, *engine_words) as engine,
        running(gateway_log, *gateway_words) as process,
        aiohttp.ClientSession() as session,
    ):
        await answers(engine, engine_log, session, f"http://127.0.0.1:{engine_port}/health")
        await answers(process, gateway_log, session, f"{url}/ready")
        gateway = Gateway(url, session)

        team = {"limits": {"budget_per_month": 50.0}}
        assert (await gateway.send("PUT", "/v1/teams/web", team, ADMIN_KEY))[0] == 200
        keys = []
        for name, limits in (("shop", {}), ("limited", {"requests_per_minute": 1})):
            body = {"name": name, "team": "web", "limits": limits}
            status, made = await gateway.send("POST", "/v1/keys", body, ADMIN_KEY)
            assert status == 200, made
            keys.append(made["secret"])

        async def lists_all() -> bool:
            _, listed = await gateway.send("GET", "/v1/models", None, keys[0])
            return {"mock", "SmolLM2-135M-Instruct"} <= {model["id"] for model in listed["data"]}

        await until(lists_all, ENGINE_WITHIN, 0.1)
        targets = {"gateway": [f"127.0.0.1:{gateway_port}"], "engine": [f"127.0.0.1:{engine_port}"]}
        async with prometheus(tmp_path, targets) as server:

            async def sees_all() -> bool:
                return await server.targets_up() == {"gateway", "engine", "prometheus"}

            await until(sees_all, SCRAPES_WITHIN, 0.1)
            for number in range(ROUNDS):
                await one_round(gateway, number, *keys)
            yield server


NEEDS_MORE = {
    # (dashboard, panel): what this test does not run
    ("keepgate-semantic", "Lookups"): "the semantic cache",
    ("keepgate-semantic", "Answers that only a veto kept back"): "the semantic cache",
    ("keepgate-semantic", "Time of a lookup"): "the semantic cache",
    ("keepgate-stack", "Disk of the volumes"): "the volumes of compose.yaml; make test-compose does",
}


@needs_prometheus
@pytest.mark.timeout(400)
async def test_every_panel_shows_something(watched: Prometheus) -> None:
    """Each query of each dashboard has numbers, but where the panel itself says when there are none; every rule of the
    alerts is evaluated without an error, and the upstream that is away is noticed.
    """

    async def empty() -> list[tuple[Panel, str]]:
        return [(p, query) for p in panels() for query in p.queries if not await watched.numbers(query)]

    async def is_settled() -> bool:  # figures of the last round come with the next scrapes
        return {(p.dashboard, p.title) for p, _ in await empty()} <= NEEDS_MORE.keys()

    try:
        await until(is_settled, SCRAPES_WITHIN, 0.5)
    except TimeoutError:
        found = [(p.dashboard, p.title, query) for p, query in await empty()]
        pytest.fail("\n".join(map(str, [entry for entry in found if entry[:2] not in NEEDS_MORE])))
    for panel, query in await empty():
        assert panel.may_be_empty or "volumes" in query, panel

    async def are_evaluated() -> bool:
        groups = (await watched.ask("rules"))["groups"]
        found = [rule for group in groups for rule in group["rules"]]
        assert all(rule["health"] != "err" for rule in found), found
        return len(found) == len(rules()) and all(rule["health"] == "ok" for rule in found)

    await until(are_evaluated, SCRAPES_WITHIN, 0.2)

    async def notices() -> bool:
        alerts = (await watched.ask("alerts"))["alerts"]
        assert all("error expanding" not in text for alert in alerts for text in alert["annotations"].values())
        return any(
            alert["labels"]["alertname"] == "UpstreamDown" and alert["labels"]["upstream"] == "gone" for alert in alerts
        )

    await until(notices, SCRAPES_WITHIN, 0.2)
