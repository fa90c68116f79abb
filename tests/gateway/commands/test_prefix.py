"""`keepgate prefix`, against a running gateway with engines' replies."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.commands import prefix
from tests.gateway.api.prefix_upstream import PrefixUpstream
from tests.gateway.client import Client
from tests.gateway.conftest import Stage

ADMIN = "the-admin-key"
STATS: dict[str, Any] = {
    "namespace": "ab12",
    "block_size": 16,
    "tokens_asked": 20_000,
    "tokens_saved": 12_000,
    "tiers": {
        "device": {"blocks": 90, "capacity_blocks": 128, "tokens_saved": 2_000},
        "memory": {
            "codec": "plain",
            "blocks": 1_500,
            "bytes": 3 * 2**29,
            "capacity_bytes": 2**32,
            "tokens_saved": 10_000,
            "hits": 700,
            "misses": 30,
        },
        "peers": {"tokens_saved": 0, "hits": 0, "misses": 2},
    },
    "decisions": {
        "fetched_blocks": {"memory": 625, "peers": 0},
        "computed_blocks": {"disk": 12},
        "late_fetches": 1,
        "block_seconds": {"computed": 0.01},
    },
}
LOOKUP: dict[str, Any] = {
    "tokens": 1_700,
    "block_size": 16,
    "leading_tokens": {"device": 0, "memory": 1_600},
    "engines": [{"names": ["gpu-2:8000"], "codec": "plain", "from": 1_600, "to": 1_696}],
}


class Command:
    """Runs the command in a thread, as the gateway needs the event loop. One upstream has a store, the other none."""

    def __init__(self, client: Client, store: PrefixUpstream, other: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = client.gateway.url
        self._capsys = capsys
        self.store = store
        self.other = other

    async def __call__(self, *words: str, key: str = ADMIN) -> tuple[int, list[str], str]:
        """Status, lines of standard output, and standard error."""
        options = ("--url", self._url, "--admin-key", key)
        status = await asyncio.to_thread(prefix.run, [*words, *options])
        printed, said = self._capsys.readouterr()
        return status, printed.splitlines(), said


@pytest.fixture
async def command(stage: Stage, capsys: pytest.CaptureFixture[str]) -> Command:
    store, other = await stage.prefix(), await stage.mock()
    client = await stage.gateway(store, other, admin_key=ADMIN)
    return Command(client, store, other.url, capsys)


async def test_figures_of_all_tiers_stand_in_a_table(command: Command) -> None:
    """Below it what was decided; an upstream without a store is named."""
    command.store.refusal = 200, msgspec.json.encode(STATS)
    status, lines, said = await command("stats")
    rows = [line.removeprefix(command.store.url).split() for line in lines[:4]]
    assert (status, said) == (0, "")
    assert rows == [
        ["UPSTREAM", "TIER", "BLOCKS", "SIZE", "TOKENS", "SAVED", "HITS", "MISSES"],
        ["device", "90", "of", "128", "blocks", "2,000", "-", "-"],
        ["memory", "1,500", "1.5", "GiB", "of", "4.0", "GiB", "10,000", "700", "30"],
        ["peers", "-", "-", "0", "0", "2"],
    ]
    assert lines[4] == (
        f"{command.store.url}: 12,000 of 20,000 prompt tokens saved; fetched: memory 625; computed: disk 12;"
        " 1 fetched too late"
    )
    assert lines[5].startswith(f"{command.other}: ")
    assert "has no prefix store" in lines[5]


async def test_a_prompt_is_looked_up_for_its_tenant(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file or from standard input, for the app whose key is given."""
    command.store.refusal = 200, msgspec.json.encode(LOOKUP)
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": "mock", "prompt": "a system prompt"}))
    status, lines, _ = await command("lookup", str(request), "--bearer", "sk-red")
    assert status == 0
    assert [line.split() for line in lines[:2]] == [
        ["UPSTREAM", "TOKENS", "DEVICE", "MEMORY"],
        [command.store.url, "1,700", "0", "1,600"],
    ]
    assert lines[2] == f"{command.store.url}: tokens 1,600 to 1,696 at gpu-2:8000"
    monkeypatch.setattr("sys.stdin", io.StringIO(request.read_text()))
    assert (await command("lookup", "-"))[0] == 0
    red, public = (received.tenant for received in command.store.store_asked)
    assert (red, public) == (("Authorization:Bearer sk-red",), ())


async def test_stores_are_cleared(command: Command) -> None:
    """All, or those of a model."""
    command.store.refusal = 200, msgspec.json.encode({"removed": 1500})
    status, lines, _ = await command("clear", "--model", "mock")
    assert (status, lines[0]) == (0, f"{command.store.url}: 1,500 blocks removed")
    (received,) = command.store.store_asked
    assert received.method == "DELETE"


async def test_the_json_is_the_gateways_answer(command: Command) -> None:
    """With every figure."""
    command.store.refusal = 200, msgspec.json.encode(STATS)
    status, lines, _ = await command("stats", "--json")
    assert status == 0
    assert json.loads("\n".join(lines))["upstreams"][command.store.url] == STATS


async def test_what_is_wrong_is_said_in_a_line(command: Command, tmp_path: Path) -> None:
    """A wrong key, a file that is not there or no request, a model that nobody has."""
    broken, number = tmp_path / "broken.json", tmp_path / "number.json"
    broken.write_text("{")
    number.write_text("5")
    for words, part in (
        (("lookup", str(tmp_path / "absent.json")), "cannot be read"),
        (("lookup", str(broken)), "is no JSON"),
        (("lookup", str(number)), "is no request"),
        (("clear", "--model", "absent"), "No upstream has the model 'absent'"),
    ):
        status, lines, said = await command(*words)
        assert (status, lines, said.count("\n")) == (1, [], 1)
        assert said.startswith(f"keepgate prefix {words[0]}: ")
        assert part in said
    status, _, said = await command("stats", key="wrong")
    assert (status, "needs another admin key" in said) == (1, True)
    assert command.store.store_asked == []


async def test_without_any_store_the_status_is_1(command: Command) -> None:
    """And each upstream says why."""
    command.store.refusal = 404, b"{}"
    status, lines, _ = await command("stats")
    assert (status, len(lines)) == (1, 2)
