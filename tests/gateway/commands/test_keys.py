"""`keepgate keys`, against a server with the admin API."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from gateway.commands import keys
from tests.cache.valkey import Valkey
from tests.gateway.api.test_keys import ADMIN, Server, serve


class Command:
    """Runs the command in a thread, as the server needs the event loop."""

    def __init__(self, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = server.url
        self._capsys = capsys

    async def __call__(self, *words: str, key: str = ADMIN, url: str = "") -> tuple[int, str, str]:
        """Status, standard output and standard error."""
        options = ("--url", url or self._url, "--admin-key", key)
        status = await asyncio.to_thread(keys.run, [*words, *options])
        return status, *self._capsys.readouterr()


@pytest.fixture
async def command(valkey: Valkey, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Command]:
    async with AsyncExitStack() as stack:
        yield Command(await serve(stack, valkey), capsys)


async def test_a_key_from_its_making_to_its_end(command: Command) -> None:
    """Create, list, limits, rotate and revoke say what they did; a secret stands alone on standard output."""
    await command("teams", "web", "--budget-per-month", "200")
    _, secret, said = await command(
        *("create", "alice", "--team", "web", "--requests-per-minute", "60", "--expires", "30d", "--models", "a", "b")
    )
    assert secret.startswith("sk-kg-")
    assert len(secret.split()) == 1
    assert said.startswith("alice (key_")
    status, listed, _ = await command("list")
    assert status == 0
    heads, row = listed.splitlines()
    assert heads.split() == ["NAME", "ID", "TEAM", "STATE", "LIMITS", "MODELS"]
    assert row.split()[0] == "alice"
    assert "60 requests/min" in row
    assert row.endswith("a, b")
    changed = await command("limits", "alice", "--requests-per-minute", "none", "--budget-per-day", "2.5")
    assert changed[1].startswith("alice: $2.50/day; models a, b; until 20")
    assert (await command("limits", "alice"))[1] == changed[1]
    assert (await command("rotate", "alice", "--grace", "1h"))[1] not in ("", secret)
    assert (await command("revoke", "alice"))[1] == "alice is revoked\n"

    assert (await command("list"))[1].count("\n") == 1
    assert "revoked" in (await command("list", "--all"))[1]
    assert (await command("teams"))[1].splitlines()[1].split() == ["web", "$200.00/month"]


async def test_a_gateway_that_asks_for_no_keys_is_named(command: Command) -> None:
    """No limit of a key holds there, which whoever makes or lists keys is told."""
    _, secret, said = await command("create", "alice", "--budget-per-day", "0.0001")
    assert secret.startswith("sk-kg-")
    assert "keys.required (KEEPGATE_KEYS_REQUIRED=true)" in said
    _, listed, said = await command("list")
    assert "$0.0001/day" in listed
    assert "no limit or budget holds" in said
    assert (await command("list", "--json"))[2] == ""


async def test_a_team_that_is_not_there_is_made_first(command: Command) -> None:
    """The message has the command."""
    assert "`keepgate keys teams nope`" in (await command("create", "x", "--team", "nope"))[2]


async def test_all_lifts_the_list_of_models(command: Command) -> None:
    """As the list of keys calls a key without one; `limits` shows what is not as it is by default."""
    await command("create", "alice", "--models", "a")
    bypassing = await command("limits", "alice", "--models", "all", "--cache", "bypass", "--priority", "3")
    assert bypassing[1] == "alice: none; cache bypass; priority 3\n"
    assert (await command("list"))[1].splitlines()[1].endswith("all")
    await command("create", "bob", "--models", "all")
    assert (await command("limits", "bob"))[1] == "bob: none\n"


async def test_limits_of_a_team_that_are_not_named_stay(command: Command) -> None:
    """Neither showing a team nor changing one limit lifts another."""
    await command("teams", "web", "--budget-per-month", "200")
    await command("teams", "web")
    changed = (await command("teams", "web", "--concurrent-requests", "4"))[1].splitlines()[1]
    assert changed.split(maxsplit=1)[1].strip() == "4 at once, $200.00/month"
    assert (await command("teams", "web", "--budget-per-month", "none"))[1].endswith("4 at once\n")


async def test_json_is_what_the_gateway_says(command: Command) -> None:
    """With --json the output is the answer of the admin API."""
    made = json.loads((await command("create", "alice", "--json"))[1])
    listed = json.loads((await command("list", "--json"))[1])
    assert [made["id"]] == [key["id"] for key in listed["data"]]
    assert "secret" not in listed["data"][0]


async def test_what_goes_wrong_is_one_line(command: Command) -> None:
    """The gateway's own words, or that none answers."""
    for words, url, key, said in (
        (("revoke", "nobody"), "", ADMIN, "There is no key 'nobody'."),
        (("create", "a b"), "", ADMIN, "'name': expected up to 64 letters"),
        (("list",), "", "wrong", "the gateway needs another admin key: --admin-key or KEEPGATE_ADMIN_KEY"),
        (("list",), "", "", "the gateway needs its admin key: --admin-key or KEEPGATE_ADMIN_KEY"),
        (("list",), "http://127.0.0.1:9", ADMIN, "no gateway answers at http://127.0.0.1:9: "),
        (("list",), "ftp://x", ADMIN, "'ftp://x' is not the URL of a gateway"),
    ):
        status, output, error = await command(*words, url=url, key=key)
        assert (status, output, error.count("\n")) == (1, "", 1)
        assert error.startswith(f"keepgate keys: {said}")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("creat",),
        ("create",),
        ("create", "a", "--requests-per-minute", "many"),
        ("create", "a", "--expires", "soon"),
        ("create", "a", "--expires", "2027-02-30"),
        ("rotate", "a", "--grace", "x"),
    ],
)
def test_a_bad_option_is_named_in_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is sent."""
    with pytest.raises(SystemExit) as end:
        keys.run(words)
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
