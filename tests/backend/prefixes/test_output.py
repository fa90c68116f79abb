"""What callers write, and what engines know each other by, is in nobody's log and in no file that is not theirs."""

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


async def test_nothing_private_is_said_when_everything_breaks(
    launch: Start, index: Valkey, secret: Path, tmp_path: Path
) -> None:
    """A prompt with a word, a tenant with a key, then a bad frame, a peer that is killed, a Redis that dies and a
    folder that vanishes: the engines say so, and nothing of word, key and secret; nor do Redis and the files' names.
    """
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
