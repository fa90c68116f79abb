"""The dashboard in a real browser: it shows what happens, updates, explains and evicts."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from cache.semantic.policy.budget import WARM_LABELS
from gateway.settings.cache import SemanticSettings
from gateway.settings.limits import KeySettings
from gateway.settings.operations import CostSettings
from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.mock import Reply
from prefix_store.store.config import StoreConfig
from tests.backend.conftest import MODEL, StartServer
from tests.backend.speculation.drafting import eager
from tests.cache.valkey import Valkey
from tests.clients.node import HERE, install, npm_cache, program
from tests.gateway.client import chat
from tests.gateway.conftest import Stage
from tests.gateway.semantic.stage import ANSWER, ASKED, SemanticStage
from tests.waiting import until

KEY = "the-admin-key"
# Of few words in common, so that no veto of wording holds.
LIKE_IT = "I forgot my password, what are the steps to reset it?"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Below the limit of a test: a wait that is over says what it waited for.
_DEADLINE = 100


def browser() -> str:
    """The path of Chromium; where it is missing, the test fails and says so."""
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    assert found, f"none of {', '.join(_BROWSERS)} is on PATH, and the dashboard needs one: apt-get install chromium"
    return found


def used(program_file: str, url: str, *arguments: str) -> dict[str, Any]:
    """What a person saw who used it as the program says; blocks."""
    command = [program("node"), str(HERE / program_file), str(install(npm_cache())), browser(), url, KEY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


async def test_an_operator_uses_the_dashboard(stage: Stage, valkey: Valkey) -> None:
    """Without an error in the console, and without a request to anybody else."""
    client = await stage.gateway(await stage.mock(), redis=valkey.url, admin_key=KEY)
    for _ in range(3):
        entry = (await client.post(chat("hot"))).entry
    cold = (await client.post(chat("cold"))).entry
    newest = (await client.tenant("any").post(chat("of an app"))).entry
    seen = await asyncio.to_thread(used, "dashboard.mjs", client.gateway.url)

    assert seen["problems"] == seen["refused"] == []
    assert seen["hosts"] == [urlsplit(client.gateway.url).netloc]
    assert seen["refusal"] == ["That is not this gateway's admin key.", "Wrong admin key."]
    assert seen["refusals"] == 2  # one without a key, one with the wrong one
    assert (seen["before"], seen["after"]) == ("40.0 %", "76.9 %")
    assert re.fullmatch(r"Saved.13 without a known price", seen["saved"])  # a dash, and no amount
    assert seen["verdicts"] >= 4
    empty = seen["empty"]
    assert "--upstream" in empty["engines"][0][0]
    assert "is not Keepgate's engine" in empty["others"][0]
    assert "no tiers" in empty["tiers"][0][0]
    assert "keepgate keys create" in empty["keys"][0][0]
    assert "semantic.mode" in empty["semantic"]
    assert empty["hidden"]
    assert "temperature: only in this request (0)" in seen["explanation"]
    assert "JSON" in seen["fault"]
    assert (seen["entries"], seen["evicted"]) == (1, f"{entry} is evicted.")
    assert (await client.get(f"/v1/cache/entries/{entry}", x_keepgate_admin_key=KEY)).status == 404
    assert seen["found"] == [newest] * 2
    assert seen["nothing"] == "No answer has this text, and no entry this id."
    assert seen["asked"] == ["mock", f"{newest[:8]}…", "miss"]
    assert seen["namespace"] == newest.partition(".")[0]
    assert seen["evictedFromRequest"] == f"{newest} is evicted."
    assert (await client.get(f"/v1/cache/entries/{newest}", x_keepgate_admin_key=KEY)).status == 404
    assert (await client.get(f"/v1/cache/entries/{cold}", x_keepgate_admin_key=KEY)).status == 200
    assert seen["phone"]["right"] < 390
    assert seen["phone"]["overflow"] <= 0
    assert seen["phone"]["charts"] == seen["dark"]["charts"] == 2
    assert seen["phone"]["background"] != seen["dark"]["background"]


async def test_an_operator_sees_engines_budgets_and_risks(
    stage: Stage, valkey: Valkey, semantic: SemanticStage, start_server: StartServer
) -> None:
    """The figures of a real engine, what a key has spent, and how reliable the semantic cache is; all of it updates."""
    engine = await start_server(speculator=eager(), prefix_store=StoreConfig(memory_bytes=16 * 2**20, name="engine"))
    mock = await stage.mock(Reply(text=ANSWER))
    observing = SemanticSettings(mode="observe", policy="budget", deadline=60.0)
    service = await semantic.service(valkey.url, policy="budget", deadline=60.0)
    client = await stage.gateway(
        mock,
        UpstreamSettings(url=engine.url, name="gpu-1"),
        UpstreamSettings(url="http://127.0.0.1:9/v1", name="gone"),
        redis=valkey.url,
        semantic=observing,
        semantic_socket=service.socket,
        admin_key=KEY,
        keys=KeySettings(required=True),
        costs=msgspec.convert({"prices": {"mock": {"input": 0, "output": 1e5}}}, CostSettings),
    )
    admin = {"x-keepgate-admin-key": KEY}
    made = await client.send("POST", "/v1/keys", {"name": "app", "limits": {"budget_per_day": 40}}, admin)
    app = client.tenant(made.json["secret"])

    async def until_semantic(name: str, is_there: Callable[[Any], bool]) -> None:
        async def is_reached() -> bool:
            stats = (await client.get("/v1/cache/stats", x_keepgate_admin_key=KEY)).json
            return is_there(stats["layers"]["semantic"][name])

        await until(is_reached, _DEADLINE, every=0.05)

    assert (await app.post(chat(ASKED, max_tokens=50))).status == 200
    await until_semantic("entries", lambda entries: bool(entries == 1))
    assert (await app.post(chat(LIKE_IT, max_tokens=50))).status == 200
    await until_semantic("reliability", lambda classes: len(classes) == 1)
    assert (await app.post(chat("Hi", model=MODEL, max_tokens=4))).status == 200
    seen = await asyncio.to_thread(used, "dashboard_panels.mjs", client.gateway.url, made.json["secret"], MODEL)

    assert seen["problems"] == seen["refused"] == []
    first, second = seen["first"], seen["second"]
    ((name, batch, queue, _, padding, blocks, prefill, decode, _, preempted),) = first["engines"]
    assert name.split("\n") == ["gpu-1", f"{MODEL}, {engine.state.model.runner.name}"]
    assert (batch.strip(), queue, padding, preempted) == ("0 of 8", "0", "0.0 %", "0")
    assert re.fullmatch(rf"0 of {engine.state.model.runner.num_blocks}, \d+ cached", blocks.strip())
    assert [int(re.findall(r"(\d+) in all", cell)[0]) > 0 for cell in (prefill, decode)] == [True, True]
    assert second["engines"] != first["engines"]
    assert any("is not Keepgate's engine" in reason for reason in first["others"])
    assert any("gone cannot be reached" in reason for reason in first["others"])
    assert [row[1] for row in first["tiers"]] == ["device (KV blocks)", "host memory"]
    device, memory = first["tiers"]
    (predicted,) = (row for row in second["drafts"] if row[1] == "prediction")
    assert predicted[0] == "gpu-1"
    assert 0 < int(predicted[2]) <= int(predicted[3])
    assert re.fullmatch(r"\d+ \([\d.]+ %\)", predicted[4].strip())
    assert float(predicted[5].split()[0]) > 0
    assert "16.8 MB" in memory[3]
    assert re.fullmatch(r"[\d.]+ [kM]B of [\d.]+ [MG]B", device[3].strip())
    assert (int(device[4]) > 0, device[5:7]) == (True, ["0", "0.0 %"])
    assert "backend.prefix_index" in first["notes"][0]

    spent = [float(re.findall(r"\$([\d.]+) of \$40.00", look["keys"][0][6])[0]) for look in (first, second)]
    assert 0 < spent[0] < spent[1]
    assert (first["keys"][0][0], first["keys"][0][7]) == ("app", "no budget")

    assert "1 judged answers" in first["semantic"]
    assert "It observes and serves nothing." in first["semantic"]
    assert f"It serves nothing before {WARM_LABELS} judgements" in first["semantic"]
    assert first["points"] == len(first["reliability"]) == 1
    assert first["reliability"][0][2:5:2] == ["0 %", "1"]
    assert "the budget (delta) is 1 %" in first["plots"][0]
    assert [row[0] for row in first["whatIf"]] == ["0.5 %", "1 %, as set", "2 %"]
    assert [row[1] for row in first["whatIf"]] == ["0"] * 3
    _, outcome, verdict, similarity, _, _, model, tenant, _ = first["decisions"][0]
    assert (outcome, verdict) == ("not served: warm-up", "same (miss)")
    assert 0.5 < float(similarity) < 1
    assert (model, len(tenant)) == ("mock", 9)
    assert seen["why"].startswith("No texts: the setting semantic.show_questions shows them.Stored answer: ")
    assert seen["why"].count(f"{tenant[:8]}") == 2
    assert "Log odds of a wrong answer: " in seen["why"]
    assert re.search(r"similarity [+\u2212]\d", seen["why"])
    assert seen["filtered"] == "No question was near to a stored one yet, or none of these."
    for look in (first, second, seen["phone"], seen["dark"]):
        assert (look["charts"], look["overflow"] <= 0) == (6, True)
    assert seen["phone"]["background"] != seen["dark"]["background"]


async def test_a_visitor_is_told_that_the_gateway_asks_for_a_key(stage: Stage, valkey: Valkey) -> None:
    """On the page at /, before a chat is sent; with a key its models are listed and a chat is answered."""
    client = await stage.gateway(
        await stage.mock(),
        redis=valkey.url,
        admin_key=KEY,
        keys=KeySettings(required=True),
    )
    made = await client.send("POST", "/v1/keys", {"name": "app"}, {"x-keepgate-admin-key": KEY})
    seen = await asyncio.to_thread(used, "start_page.mjs", client.gateway.url, made.json["secret"])
    assert seen["problems"] == []
    assert seen["label"] == "API key, which this gateway asks for"
    assert seen["said"] == seen["validation"] == "This gateway asks for a key: enter yours, and its models are listed."
    assert (seen["models"], seen["after"], seen["answer"]) == (["mock"], "", "What is the capital of France?")
