"""Prompts, keys, namespaces and the shared secret appear in no log and no file name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import redis.asyncio

from tests.backend.prefixes.conftest import SECRET, Start
from tests.backend.prefixes.engine_process import start_all
from tests.backend.prefixes.keeping import claiming, writing
from tests.backend.prefixes.models import BLOCK
from tests.cache.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORD = "swordfish"
PROMPT = f"The word of the day is {WORD}, and nobody else may ever learn of it. " * 3
TENANT = {"Authorization": "Bearer sk-a-key-of-anna", "x-keepgate-namespace": "annas-own"}
PRIVATE = (WORD, SECRET, "sk-a-key-of-anna", "annas-own")


async def test_faults_write_nothing_private_to_logs_redis_or_file_names(
    launch: Start, index: Valkey, secret: Path, tmp_path: Path
) -> None:
    """Prompts, keys, namespaces and the secret are in no log, file name or Redis, even when every part fails."""
    disk = tmp_path / "kv"
    common = ("--prefix-memory", "16MiB", "--prefix-index", index.url, "--prefix-secret-file", str(secret))
    near, far = launch(*common), launch(*common, "--prefix-disk", str(disk))
    start_all([near, far])
    async with claiming(index.url, len(PROMPT) // BLOCK):
        await near.ask(PROMPT, headers=TENANT)
    async with writing(disk, len(PROMPT) // BLOCK) as files:
        await far.ask(PROMPT, headers=TENANT)
    for file in files:
        file.write_bytes(b"swapped")
    far.kill()
    far.restart()
    await far.ask(PROMPT + "?", headers=TENANT)
    near.kill()
    await far.ask(PROMPT + "!", headers={"Authorization": "Bearer sk-a-key-of-anna"})
    names = [str(path.relative_to(tmp_path)) for path in disk.rglob("*")]
    async with redis.asyncio.Redis.from_url(index.url) as client:
        known = [name async for name in client.scan_iter()]
        values = [await client.dump(name) for name in known]
    assert known
    in_redis = b"".join([*known, *(value for value in values if value)])
    await index.kill()
    shutil.rmtree(disk, ignore_errors=True)
    await far.ask(PROMPT + "...", headers=TENANT)
    far.stop()
    for private in PRIVATE:
        assert private.encode() not in in_redis
        assert private not in near.said
        assert private not in far.said
        assert not [name for name in names if private in name]
    assert "WARNING" in far.said
    assert "Traceback" not in far.said
