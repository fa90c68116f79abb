"""A real Prometheus with the configuration of deploy/prometheus, and the panels of deploy/grafana, whose queries it
answers.
"""

import asyncio
import json
import math
import re
import shutil
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
GRAFANA = ROOT / "deploy/grafana"
START_WITHIN = 30.0
# What Grafana puts in place of these, where the scrapes are a fraction of a second apart.
GRAFANA_VARIABLES = {"$__rate_interval": "5s", "$__range": "1m", "$instance": ".*"}


@dataclass(frozen=True)
class Panel:
    """One panel of a dashboard. `queries` are as its file has them."""

    dashboard: str
    title: str
    description: str
    queries: tuple[str, ...]

    @property
    def may_be_empty(self) -> bool:
        """Whether the panel says when there is nothing to see."""
        return re.search(r"(Empty|No numbers) (until|while)", self.description) is not None


def dashboards() -> dict[str, dict[str, Any]]:
    """The dashboards by their files' names."""
    files = sorted((GRAFANA / "dashboards").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def panels() -> Iterator[Panel]:
    """All panels that show something."""
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            if panel["type"] != "row":
                queries = tuple(target["expr"] for target in panel["targets"])
                yield Panel(name, panel["title"], panel["description"], queries)


def rules() -> list[dict[str, Any]]:
    """The alert rules."""
    text = (PROMETHEUS / "rules/keepgate.yml").read_text(encoding="utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def missing_program() -> str:
    """Why Prometheus cannot be run here, or nothing."""
    away = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"{' and '.join(away)} not found: apt-get install prometheus" if away else ""


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Prometheus:
    """A running server."""

    url: str
    session: aiohttp.ClientSession

    async def ask(self, path: str, **params: str) -> Any:
        """The `data` of an answer of its HTTP API. Raises AssertionError with its words where it refuses."""
        async with self.session.get(f"{self.url}/api/v1/{path}", params=params) as response:
            answer = await response.json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    async def numbers(self, query: str, seconds: float = 60.0) -> list[float]:
        """What a query of a panel has shown in the last `seconds`, but for what is no number."""
        for name, text in GRAFANA_VARIABLES.items():
            query = query.replace(name, text)
        now = float((await self.ask("query", query="time()"))["result"][1])
        answer = await self.ask("query_range", query=query, start=str(now - seconds), end=str(now), step="1")
        found = [float(value) for series in answer["result"] for _, value in series["values"]]
        return [value for value in found if not math.isnan(value)]

    async def targets_up(self) -> set[str]:
        """The jobs of the targets that it reaches."""
        active = (await self.ask("targets"))["activeTargets"]
        return {target["labels"]["job"] for target in active if target["health"] == "up"}


@asynccontextmanager
async def prometheus(folder: Path, targets: Mapping[str, Sequence[str]]) -> AsyncIterator[Prometheus]:
    """Prometheus as in compose.yaml, but with these targets of its jobs, and asking them four times a second."""
    port = free_port()
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    own = {**targets, "prometheus": [f"127.0.0.1:{port}"]}
    assert own.keys() <= {job["job_name"] for job in config["scrape_configs"]}
    config["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": list(addresses)}]} for job, addresses in own.items()
    ]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    log = (folder / "prometheus.log").open("wb")
    address = f"--web.listen-address=127.0.0.1:{port}"
    options = (f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", address)
    process = await asyncio.create_subprocess_exec("prometheus", *options, stdout=log, stderr=log)
    try:
        async with aiohttp.ClientSession() as session:
            server = Prometheus(f"http://127.0.0.1:{port}", session)

            async def is_ready() -> bool:
                assert process.returncode is None, (folder / "prometheus.log").read_text()
                try:
                    async with session.get(f"{server.url}/-/ready") as response:
                        return response.status == 200
                except aiohttp.ClientConnectionError:
                    return False

            await until(is_ready, START_WITHIN, 0.05)
            yield server
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()
