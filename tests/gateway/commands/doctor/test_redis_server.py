"""Redis: what real servers, in all states, are found to be."""

import os
from pathlib import Path

import pytest

from gateway.commands.doctor.finding import Finding
from gateway.commands.doctor.redis_server import check_redis
from gateway.processes.embedded_store import embedded_store
from gateway.settings.limits import KeySettings
from gateway.settings.settings import Settings
from tests.cache.valkey import Valkey
from tests.cache.valkey_cluster import running_cluster, running_sentinels
from tests.gateway.processes.serving import free_port

KEYS = KeySettings(required=True)


async def found(url: str, keys: KeySettings = KeySettings()) -> dict[str, Finding]:  # noqa: B008  # frozen
    return {each.check: each for each in await check_redis(Settings(redis=url, keys=keys))}


async def test_a_server_without_a_limit_is_a_warning(valkey: Valkey) -> None:
    """A server that answers is ok, with its version and topology; without maxmemory it may grow without end."""
    by_check = await found(valkey.url)
    assert by_check["redis"].status == "ok"
    assert "Valkey" in by_check["redis"].summary
    assert "one server" in by_check["redis"].summary
    assert by_check["redis rights"].status == "ok"
    assert by_check["clock"].status == "ok"
    assert "cache.redis_deadline is 20 ms" in by_check["redis latency"].summary
    assert (by_check["redis memory"].status, "maxmemory" in by_check["redis memory"].advice) == ("warning", True)


@pytest.mark.parametrize(
    ("policy", "keys", "status"),
    [
        ("volatile-lru", KEYS, "ok"),
        ("allkeys-lru", KeySettings(), "ok"),
        ("allkeys-lru", KEYS, "problem"),
        ("noeviction", KeySettings(), "warning"),
    ],
)
async def test_the_eviction_policy_is_judged_by_what_is_stored(
    late_valkey: Valkey, policy: str, keys: KeySettings, status: str
) -> None:
    """noeviction refuses answers when the memory is full; allkeys evicts virtual keys, where there are some."""
    await late_valkey.start("--maxmemory", "100mb", "--maxmemory-policy", policy)
    assert (await found(late_valkey.url, keys))["redis memory"].status == status


@pytest.mark.parametrize(
    ("options", "keys", "status"),
    [
        (("--appendonly", "yes"), KEYS, "ok"),
        (("--appendonly", "no"), KeySettings(), "ok"),
        (("--appendonly", "no"), KEYS, "problem"),
        (("--appendonly", "no", "--save", "3600 1"), KEYS, "warning"),
    ],
)
async def test_persistence_matters_where_keys_are_stored(
    late_valkey: Valkey, options: tuple[str, ...], keys: KeySettings, status: str
) -> None:
    """Answers may end with a restart; virtual keys must not."""
    await late_valkey.start(*options)
    assert (await found(late_valkey.url, keys))["redis persistence"].status == status


async def test_a_server_that_is_full_refuses_a_write(late_valkey: Valkey) -> None:
    """A write that Redis refuses for want of memory is a problem, with what to do."""
    await late_valkey.start("--maxmemory", "1kb", "--maxmemory-policy", "noeviction")
    rights = (await found(late_valkey.url))["redis rights"]
    assert (rights.status, "maxmemory" in rights.advice) == ("problem", True)


async def test_a_user_without_rights_is_told_where_they_are_listed(late_valkey: Valkey) -> None:
    """A user that may read and not write is a problem of its rights."""
    rules = ("reader", "on", ">word", "~*", "+@read", "+ping", "+info", "+time", "-@write")
    await late_valkey.start("--user", *rules)
    url = late_valkey.url.replace("unix://", "unix://reader:word@")
    rights = (await found(url))["redis rights"]
    assert (rights.status, "Rights" in rights.advice) == ("problem", True)


async def test_refused_credentials_are_named_without_the_password(late_valkey: Valkey) -> None:
    """A wrong password is a problem of the URL, which is shown without it."""
    await late_valkey.start("--requirepass", "right-word")
    url = late_valkey.url.replace("unix://", "unix://:wrong-word@")
    (only,) = await check_redis(Settings(redis=url))
    assert only.status == "problem"
    assert "refuses the credentials" in only.summary
    assert "wrong-word" not in only.summary


async def test_a_server_that_is_away_is_a_problem() -> None:
    """Nothing listens there: one finding, with what follows from it."""
    (only,) = await check_redis(Settings(redis=f"redis://127.0.0.1:{free_port()}/0"))
    assert (only.status, "cannot be reached" in only.summary) == ("problem", True)


async def test_a_server_that_hangs_is_given_up(own_valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen server is a problem after some seconds, not a check that never ends."""
    monkeypatch.setattr("gateway.commands.doctor.redis_server._REACH_SECONDS", 0.2)
    own_valkey.freeze()
    (only,) = await check_redis(Settings(redis=own_valkey.url))
    own_valkey.thaw()
    assert "no answer in 0.2 s" in only.summary


async def test_a_replica_takes_no_writes(late_valkey: Valkey) -> None:
    """The URL of a replica is a problem: nothing could be stored."""
    await late_valkey.start("--replicaof", "127.0.0.1", str(free_port()))
    findings = await check_redis(Settings(redis=late_valkey.url))
    problems = [each.summary for each in findings if each.status == "problem"]
    assert any("is a replica of" in summary for summary in problems)
    assert any("a write is refused" in summary for summary in problems)


async def test_each_master_of_a_cluster_is_looked_at() -> None:
    """A cluster has a finding for each master; one of its nodes under a plain URL is a problem."""
    async with running_cluster() as servers:
        findings = await check_redis(Settings(redis=servers.url))
        masters = [each for each in findings if each.check == "redis"]
        assert [each.status for each in masters] == ["ok", "ok", "ok"]
        assert "master 1 of 3" in masters[0].summary
        single = await check_redis(Settings(redis=f"redis://127.0.0.1:{servers.masters[0].port}/0"))
    assert any("redis+cluster://" in each.advice for each in single if each.status == "problem")


async def test_the_master_is_found_behind_sentinels() -> None:
    """What is looked at is the master that the sentinels name, with its replicas."""
    async with running_sentinels() as servers:
        findings = await check_redis(Settings(redis=servers.url))
    assert "the master that the sentinels name, 2 replicas" in findings[0].summary


async def test_the_embedded_server_is_tried_on_an_empty_folder(folder: Path) -> None:
    """Where none runs, one is started elsewhere: the state folder stays as it was."""
    findings = await check_redis(Settings(state_dir=str(folder)))
    # A lookup may be slow on a busy machine.
    assert [each for each in findings if each.status != "ok" and each.check != "redis latency"] == []
    assert "tried on an empty folder" in findings[0].summary
    assert os.listdir(folder) == []


async def test_the_embedded_server_that_runs_is_looked_at(folder: Path) -> None:
    """A gateway's own server is asked on its socket, and not started twice."""
    async with embedded_store(folder, 64 * 2**20):
        findings = await check_redis(Settings(state_dir=str(folder)))
    assert f"embedded, running in {folder}" in findings[0].summary
    assert "64 MiB" in next(each.summary for each in findings if each.check == "redis memory")


async def test_an_embedded_server_without_a_program_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the package nor a program on PATH: a problem that names both ways out."""
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("gateway.processes.embedded_store.importlib.util.find_spec", lambda name: None)
    (only,) = await check_redis(Settings(state_dir=str(folder)))
    assert only.status == "problem"
    assert "no server program found" in only.summary
