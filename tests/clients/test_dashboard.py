"""The dashboard in a real browser: it shows what happens, updates, explains and evicts."""

import asyncio
import json
import shutil
import subprocess
from typing import Any
from urllib.parse import urlsplit

from tests.cache.valkey import Valkey
from tests.clients.node import HERE, install, npm_cache, program
from tests.gateway.client import chat
from tests.gateway.conftest import Stage

KEY = "the-admin-key"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_DEADLINE = 240


def browser() -> str:
    """The path of Chromium; where it is missing, the test fails and says so."""
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    assert found, f"none of {', '.join(_BROWSERS)} is on PATH, and the dashboard needs one: apt-get install chromium"
    return found


def used(url: str) -> dict[str, Any]:
    """What a person saw who used it; blocks."""
    command = [program("node"), str(HERE / "dashboard.mjs"), str(install(npm_cache())), browser(), url, KEY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


async def test_an_operator_uses_the_dashboard(stage: Stage, valkey: Valkey) -> None:
    """Without an error in the console, and without a request to anybody else."""
    client = await stage.gateway(await stage.mock(), redis=valkey.url, admin_key=KEY, cache={"redis_deadline": 2.0})
    for _ in range(3):
        entry = (await client.post(chat("hot"))).entry
    await client.post(chat("cold"))
    seen = await asyncio.to_thread(used, client.gateway.url)

    assert seen["problems"] == seen["refused"] == []
    assert seen["hosts"] == [urlsplit(client.gateway.url).netloc]
    assert "admin key" in seen["refusal"]
    assert (seen["before"], seen["after"]) == ("50.0 %", "83.3 %")
    assert seen["verdicts"] >= 4
    assert "temperature: only in this request (0)" in seen["explanation"]
    assert "JSON" in seen["fault"]
    assert (seen["entries"], seen["evicted"]) == (1, f"{entry} is evicted.")
    assert (await client.get(f"/v1/cache/entries/{entry}", x_keepgate_admin_key=KEY)).status == 404
    assert seen["phone"]["overflow"] <= 0
    assert seen["phone"]["charts"] == seen["dark"]["charts"] == 2
    assert seen["phone"]["background"] != seen["dark"]["background"]
