"""`keepgate cache`, against a running gateway."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.commands import cache
from tests.cache.valkey import Valkey
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage

ADMIN = "the-admin-key"


class Command:
    """Runs the command in a thread, as the gateway needs the event loop."""

    def __init__(self, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
        self.client = client
        self._capsys = capsys

    async def __call__(self, *words: str, key: str = ADMIN) -> tuple[int, str, str]:
        """Status, standard output and standard error."""
        options = ("--url", self.client.gateway.url, "--admin-key", key)
        status = await asyncio.to_thread(cache.run, [*words, *options])
        return status, *self._capsys.readouterr()

    async def json(self, *words: str) -> Any:
        status, printed, said = await self(*words, "--json")
        assert (status, said) == (0, "")
        return json.loads(printed)


@pytest.fixture
async def command(stage: Stage, valkey: Valkey, capsys: pytest.CaptureFixture[str]) -> Command:
    client = await stage.gateway(await stage.mock(models=("mock", "other")), redis=valkey.url, admin_key=ADMIN)
    return Command(client, capsys)


async def test_figures_of_all_windows_stand_side_by_side(command: Command) -> None:
    """With a row for each model where that is asked for; the JSON is the gateway's answer."""
    for content in ("a", "a", "b"):
        await command.client.post(chat(content))
    await command.client.post(chat("c", model="other"))
    status, printed, _ = await command("stats", "--by", "model")
    lines = {line[:28].strip(): line[28:].split() for line in printed.splitlines()}
    assert status == 0
    assert lines["requests"] == ["4"] * 4
    assert lines["hit rate"] == ["25.0%"] * 4
    rows = [line.split() for line in printed.splitlines()[-2:]]
    assert [row[:4] for row in rows] == [["mock", "3", "1", "33.3%"], ["other", "1", "0", "0.0%"]]
    assert (await command.json("stats"))["windows"]["all"]["requests"] == 4


async def test_entries_are_listed_shown_and_deleted(command: Command) -> None:
    """Hottest first where that is asked for; an id that is shown can be used."""
    hot = (await command.client.post(chat("hot", temperature=0.5))).entry
    await command.client.post(chat("hot", temperature=0.5))
    cold = (await command.client.post(chat("cold", model="other"))).entry
    _, printed, _ = await command("ls")
    assert [line.split()[:3] for line in printed.splitlines()] == [
        ["ID", "MODEL", "HITS"],
        [cold, "other", "0"],
        [hot, "mock", "1"],
    ]
    assert printed.splitlines()[2].endswith("temperature=0.5")
    assert [each["id"] for each in (await command.json("ls", "--order", "hits"))["data"]] == [hot]
    status, printed, _ = await command("ls", "--limit", "1")
    assert printed.splitlines()[-1].startswith("There are more: --cursor '")
    status, printed, _ = await command("show", hot)
    assert status == 0
    assert "temperature   0.5" in printed
    assert '"content": "hot"' in printed
    assert (await command("purge", hot))[1] == "Deleted.\n"
    assert (await command("purge", "--model", "other"))[1] == "Purged.\n"
    assert (await command("ls"))[1] == "No entry.\n"


async def test_a_miss_is_explained(command: Command, tmp_path: Path) -> None:
    """A line for each layer, and for each field by which the nearest entry is missed."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 7 x 8?"}]
    entry = (await command.client.post({"model": "mock", "messages": messages, "temperature": 0.5})).entry
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"model": "mock", "messages": [*messages[:1], *messages], "top_p": 0.5}))
    status, printed, _ = await command("explain", str(file))
    assert status == 0
    lines = printed.splitlines()
    assert lines[1:3] == [
        "exact     miss: no entry has its key",
        "semantic  off: the semantic cache is off (semantic.mode)",
    ]
    assert lines[4].startswith(f"{entry}  mock, ")
    assert lines[5:] == [
        "  temperature: only in the entry's (0.5)",
        "  top_p: only in this request (0.5)",
        '  messages[1]: only in this request ("system")',
    ]


async def test_a_request_is_explained_as_the_apps(command: Command, tmp_path: Path) -> None:
    """With its key; the operator, who has named no tenant, is told that another one has the answer."""
    entry = (await command.client.tenant("any").post(chat("hello"))).entry
    file = tmp_path / "request.json"
    file.write_text(json.dumps(chat("hello")))
    _, printed, _ = await command("explain", str(file))
    assert "No entry of the tenant public was asked much the same." in printed
    assert f"--namespace {entry.partition('.')[0]} explains its request, as --bearer KEY does" in printed
    _, printed, _ = await command("explain", str(file), "--bearer", "any")
    assert printed.splitlines()[:2] == [f"key       {entry}", "exact     hit: the answer is in memory, 0 s old"]
    _, _, told = await command("explain", str(file), "--bearer", "any", "--namespace", "public")
    assert told == "keepgate cache explain: --bearer says whose request it is; leave out --namespace\n"


async def test_a_wrong_answer_is_said_to_be_one(command: Command) -> None:
    """And is deleted; without a semantic cache nobody learns from it."""
    entry = (await command.client.post(chat("hello"))).entry
    assert (await command("purge", entry, "--wrong"))[1] == "Deleted as wrong; the semantic cache has 0 labels of it.\n"
    assert (await command.client.post(chat("hello"))).cache == "miss"


async def test_money_that_is_not_known_is_not_zero(command: Command) -> None:
    """Neither what an answer cost nor what hits saved; a table without rows says why it has none."""
    for _ in range(2):
        await command.client.post(chat("hello"))
    _, printed, _ = await command("stats", "--by", "model")
    lines = {line[:28].strip(): line[28:].split() for line in printed.splitlines()}
    assert (lines["cost"], lines["saved"]) == (["-"] * 4, ["-"] * 4)
    assert "Requests without a known price, which are in no sum: 2 (all time)" in printed
    assert printed.splitlines()[-1].split()[-2:] == ["-", "-"]
    _, printed, _ = await command("stats", "--by", "key", "--window", "5m")
    assert printed.splitlines()[-1] == "No request with a key in five minutes."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("purge",), "say what to purge: an ID, or one of --model, --namespace, --tag, --layer"),
        (("purge", "--all", "--model", "m"), "say what to purge"),
        (("show", "public.00"), "There is no entry 'public.00'"),
        (("ls", "--order", "oldest"), "'order' must be newest or hits."),
        (("explain", "nothing.json"), "nothing.json cannot be read: No such file or directory"),
        (("warm", "nothing.jsonl"), "nothing.jsonl cannot be read: No such file or directory"),
        (("purge", "--all", "--wrong"), "--wrong is said of one entry: give its ID"),
    ],
)
async def test_what_is_wrong_is_said_in_a_line(command: Command, words: tuple[str, ...], said: str) -> None:
    """With status 1, and the name of the command."""
    status, printed, told = await command(*words)
    assert (status, printed) == (1, "")
    assert told.startswith(f"keepgate cache {words[0]}: ")
    assert said in told
    assert told.count("\n") == 1


async def test_without_the_admin_key_it_says_so(command: Command) -> None:
    """And where it can be given."""
    status, _, told = await command("stats", key="")
    assert status == 1
    assert "--admin-key or KEEPGATE_ADMIN_KEY" in told


async def test_a_file_that_is_no_json_is_named(command: Command, tmp_path: Path) -> None:
    """With its fault."""
    file = tmp_path / "request.json"
    file.write_text("{")
    _, _, told = await command("explain", str(file))
    assert f"{file} is no JSON" in told


async def test_requests_are_computed_before_anybody_asks(command: Command, tmp_path: Path) -> None:
    """Each once; what is there already is not computed again, and a second run computes what is new."""
    client = command.client.tenant("sk-tenant")
    await client.post(chat("known"))
    file = tmp_path / "questions.jsonl"
    bodies = [chat(content) for content in ("one", "two", "known")]
    file.write_text("\n".join(map(json.dumps, bodies)) + "\n\n")
    status, printed, _ = await command("warm", str(file), "--key", "sk-tenant")
    assert status == 0, printed
    assert "3 of 3" in printed
    assert printed.splitlines()[-1].endswith(" completed.")
    for content in ("one", "two"):
        assert (await client.post(chat(content))).cache == "hit"
    assert (await command.client.post(chat("one"))).cache == "miss"
    file.write_text(file.read_text() + json.dumps(chat("three")))
    batch = await command.json("warm", str(file), "--key", "sk-tenant")
    assert (batch["request_counts"], batch["metadata"]) == (
        {"total": 4, "completed": 4, "failed": 0},
        {"purpose": "warm"},
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "The body has no request"),
        ('{"model": "mock"}\n[1]\n', "Request 2 is no JSON object"),
        ('{"url": "/v1/embeddings", "body": {}}', "Request 1 is for '/v1/embeddings', and 'path' is"),
    ],
)
async def test_requests_that_cannot_be_read_are_named(command: Command, tmp_path: Path, text: str, said: str) -> None:
    """By their number; nothing of the file is kept."""
    file = tmp_path / "questions.jsonl"
    file.write_text(text)
    status, _, told = await command("warm", str(file))
    assert status == 1
    assert said in told
    assert (await command.client.get("/v1/files")).json["data"] == []


async def test_top_shows_the_hottest(command: Command) -> None:
    """As often as asked for."""
    for _ in range(3):
        entry = (await command.client.post(chat("hot"))).entry
    status, printed, _ = await command("top", "--times", "2", "--every", "0")
    assert status == 0
    assert printed.count(entry) == 2
    assert "66.7%" in printed
