"""Tenants never see each other's prefixes, wherever they are kept; all tenants share published prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import EngineProcess, fresh, start_all
from tests.backend.prefixes.keeping import claiming, until_met, writing
from tests.backend.prefixes.models import BLOCK
from tests.cache.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 500
BLOCKS = TOKENS // BLOCK
WHOLE = BLOCKS * BLOCK
SHARED = "You are a helpful machine of the house and answer in one sentence. " * 4
"""What the operator publishes, a token for each of its letters."""
PUBLISHED = len(SHARED) // BLOCK * BLOCK

KEY = {"Authorization": "Bearer key-of-anna"}
STRANGERS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer key-of-bert"},
    {"x-keepgate-namespace": "Bearer key-of-anna"},
    {**KEY, "x-keepgate-namespace": "another"},
]


@dataclass
class EngineGroup:
    """Two engines with memories of their own, a folder and Redis in common, and one on that folder without Redis."""

    index: str
    disk: Path
    near: EngineProcess
    far: EngineProcess
    local: EngineProcess


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(launch: Start, index: Valkey, secret: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineGroup:
    public = tmp_path_factory.mktemp("public") / "prompt.txt"
    public.write_text(SHARED, "utf-8")
    disk = tmp_path_factory.mktemp("disk") / "kv"
    common = ("--prefix-secret-file", str(secret), "--public-prefix", str(public))
    folder = ("--prefix-disk", str(disk))
    redis = ("--prefix-memory", "64MiB", "--prefix-index", index.url)
    engines = [launch(*common, *folder, *redis), launch(*common, *redis), launch(*common, *folder)]
    start_all(engines)
    await until_met(index.url, *engines[:2])
    return EngineGroup(index.url, disk, *engines)


async def kept(group: EngineGroup, prompt: list[int] | str, blocks: int, headers: dict[str, str]) -> None:
    """Returns when the near engine has a tenant's prompt in memory and folder, and the index knows."""
    async with claiming(group.index, blocks), writing(group.disk, blocks):
        await group.near.ask(prompt, headers=headers)


@pytest.mark.parametrize("headers", STRANGERS, ids=[" ".join(headers.values()) or "none" for headers in STRANGERS])
async def test_another_tenants_prefix_is_found_in_no_tier(
    group: EngineGroup, plain: EngineProcess, headers: dict[str, str]
) -> None:
    """A tenant's prefix is computed in full for every other tenant at pool, peer and disk, and restored for itself."""
    for engine in (group.near, group.far, group.local):
        prompt = fresh(TOKENS)  # a new one for each: a stranger may find again what it computed itself
        expected = await plain.ask(prompt)
        await kept(group, prompt, BLOCKS, KEY)
        before = await engine.counted("computed_rows_total")
        stranger = await engine.ask(prompt, headers=headers)
        assert await engine.counted("computed_rows_total") - before >= TOKENS  # so its time tells nothing either
        own = await engine.ask(prompt, headers=KEY)
        assert (stranger.restored, own.restored) == (0, WHOLE)
        assert stranger.choices == own.choices == expected.choices


async def test_a_namespace_is_a_tenant(group: EngineGroup) -> None:
    """Each pair of key and namespace is a tenant of its own at every engine; a salt separates within a tenant alone."""
    prompt = fresh(TOKENS)
    one, other = ({**KEY, "x-keepgate-namespace": name} for name in ("one", "other"))
    await kept(group, prompt, BLOCKS, one)
    for headers in (other, {**one, "Authorization": "Bearer key-of-bert"}, {"x-keepgate-namespace": "one"}):
        assert (await group.near.ask(prompt, headers=headers)).restored == 0
    for headers in (one, other, {}):
        assert (await group.near.ask(prompt, headers=headers, cache_salt="one")).restored == 0
    assert (await group.far.ask(prompt, headers=one)).restored == WHOLE


async def test_tenants_last_as_long_as_the_secret(group: EngineGroup, secret: Path, tmp_path: Path) -> None:
    """After a restart a tenant finds its blocks on the disk with the same secret, and not with another."""
    prompt = fresh(TOKENS)
    async with writing(group.disk, BLOCKS):
        await group.local.ask(prompt, headers=KEY)
    other = tmp_path / "secret"
    other.write_text("another secret of an engine that is misled", "utf-8")
    other.chmod(0o600)
    folder = ("--prefix-disk", str(group.disk))
    for options, restored in (
        (("--prefix-secret-file", str(other)), 0),
        (("--prefix-secret-file", str(secret)), WHOLE),
    ):
        group.local.stop()
        group.local.restart("--kv-memory", "16MiB", *folder, *options)
        assert (await group.local.ask(prompt, headers=KEY)).restored == restored
    assert "misled" not in group.local.said


async def test_all_tenants_share_published_prefixes(group: EngineGroup, plain: EngineProcess) -> None:
    """All tenants share the whole blocks of a published prefix, and no token beyond it."""
    said = SHARED + "anna asks something that nobody else may know, and it is long enough for some blocks"
    await kept(group, said, len(said) // BLOCK, KEY)
    for engine in (group.near, group.far):
        answer = await engine.ask(said, headers={"Authorization": f"Bearer new at {engine.url}"})
        assert answer.restored == PUBLISHED
        assert answer.choices == (await plain.ask(said)).choices
        other = {"x-keepgate-namespace": f"new at {engine.url}"}
        assert (await engine.ask(SHARED + "bert asks something else", headers=other)).restored == PUBLISHED
