"""compose.yaml on a real Docker engine: what its Prometheus sees and says, and Grafana where its image can be had."""

import base64
import json
import time
import urllib.parse
import urllib.request
from typing import Any

import pytest

from tests.compose import base_images
from tests.compose.monitoring import panels, rules
from tests.compose.stack import Stack, until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

SEEN_WITHIN = 90.0  # seconds: some scrapes of 15 s
FIRES_WITHIN = 240.0  # seconds: a health check, two scrapes, a minute, an evaluation; on a busy machine
GRAFANA_VARIABLES = {"$__rate_interval": "1m", "$__range": "5m", "$instance": ".*"}


def ask(stack: Stack, path: str, **params: str) -> Any:
    """The `data` of an answer of Prometheus' HTTP API."""
    url = f"http://127.0.0.1:{stack.prometheus_port}/api/v1/{path}?{urllib.parse.urlencode(params)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.loads(response.read())["data"]


def is_shown(stack: Stack, query: str) -> bool:
    """Whether a panel's query has numbers of the last five minutes."""
    for name, text in GRAFANA_VARIABLES.items():
        query = query.replace(name, text)
    now = time.time()
    found = ask(stack, "query_range", query=query, start=str(now - 300), end=str(now), step="15")["result"]
    return any(value != "NaN" for series in found for _, value in series["values"])


def alerts(stack: Stack, state: str) -> set[str]:
    """The names of the alerts in a state."""
    return {alert["labels"]["alertname"] for alert in ask(stack, "alerts")["alerts"] if alert["state"] == state}


def ask_about(stack: Stack, number: int) -> None:
    """One miss and two hits."""
    messages = [{"role": "user", "content": f"Question {number} about the weather of yesterday and of tomorrow."}]
    for _ in range(3):
        assert stack.post({"model": stack.model(), "messages": messages, "max_tokens": 4}).status == 200


def test_prometheus_reaches_everything(stack: Stack) -> None:
    """The gateway by its common name, the engine that runs, the disks; and all rules are evaluated."""

    def up() -> dict[str, str]:
        return {
            target["labels"]["job"]: target["health"]
            for target in ask(stack, "targets", state="active")["activeTargets"]
        }

    expected = dict.fromkeys(("gateway", "engine", "disks", "prometheus"), "up")
    until(lambda: up() == expected, SEEN_WITHIN, lambda: f"{up()}\n{stack.logs('prometheus')}")
    found = [rule for group in ask(stack, "rules")["groups"] for rule in group["rules"]]
    assert len(found) == len(rules())
    until(
        lambda: all(rule["health"] == "ok" for group in ask(stack, "rules")["groups"] for rule in group["rules"]),
        SEEN_WITHIN,
        lambda: str(ask(stack, "rules")),
    )


def test_every_panel_shows_something_or_says_why_not(stack: Stack) -> None:
    """After some traffic; the disks of the volumes are among it, which only this stack has."""
    for number in range(4):
        ask_about(stack, number)
        time.sleep(15)  # rates need figures of several scrapes

    def empty() -> list[tuple[str, str, str]]:
        return [
            (panel.dashboard, panel.title, query)
            for panel in panels()
            for query in panel.queries
            if not panel.may_be_empty and not is_shown(stack, query)
        ]

    until(lambda: not empty(), SEEN_WITHIN, lambda: "\n".join(map(str, empty())))
    assert is_shown(stack, next(p.queries[0] for p in panels() if p.title == "Disk of the volumes"))
    watched = ask(stack, "query", query='node_filesystem_avail_bytes{mountpoint=~"/volumes/.*"}')["result"]
    assert {each["metric"]["mountpoint"] for each in watched} == {
        f"/volumes/{name}" for name in ("redis", "models", "prefixes", "gateway", "prometheus")
    }


def test_an_engine_that_is_away_is_reported_and_the_report_ends(stack: Stack) -> None:
    """By the alert on upstreams, a minute later."""
    stack.compose("stop", "backend")
    try:
        until(lambda: "UpstreamDown" in alerts(stack, "firing"), FIRES_WITHIN, lambda: str(ask(stack, "alerts")))
        (alert,) = (a for a in ask(stack, "alerts")["alerts"] if a["labels"]["alertname"] == "UpstreamDown")
        assert "backend" in alert["annotations"]["summary"]
        assert "GET /v1/routing" in alert["annotations"]["runbook"]
    finally:
        stack.up("backend", "gateway")
    until(lambda: "UpstreamDown" not in alerts(stack, "firing"), FIRES_WITHIN, lambda: str(ask(stack, "alerts")))


def test_grafana_shows_the_dashboards(stack: Stack) -> None:
    """Provisioned, with the one source, behind the password that `prepare` has made."""
    if not base_images.present(stack.engine, base_images.GRAFANA):
        pytest.skip("no hub answers, and no Debian package has Grafana")
    stack.up("grafana")
    password = stack.execute("grafana", "cat", "/run/keepgate/admin_password").strip()
    login = base64.b64encode(f"admin:{password}".encode()).decode()
    look = f"wget -q -O - --header 'Authorization: Basic {login}' http://127.0.0.1:3000/api"
    found = json.loads(stack.execute("grafana", "sh", "-c", f"{look}/search?type=dash-db"))
    assert {each["uid"] for each in found} == {panel.dashboard for panel in panels()}
    health = json.loads(stack.execute("grafana", "sh", "-c", f"{look}/datasources/uid/prometheus/health"))
    assert health["status"] == "OK"
