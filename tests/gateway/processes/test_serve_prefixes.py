"""`keepgate serve` with its own backend: its prefix store, by tenant, place and visibility."""

import signal
from pathlib import Path
from typing import Any

from tests.cache.valkey import Valkey
from tests.gateway.client import CHAT
from tests.gateway.processes.serving import DEADLINE, Serving, serving
from tests.waiting import until

MODEL = "SmolLM2-135M-Instruct"
PREFIX = "/v1/cache/prefix"
LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count these stars: " + "star " * 200}],
    "temperature": 0,
    "max_tokens": 1,
}


async def ask_anew(gateway: Serving, key: str) -> int:
    """How many tokens of a long prompt are reused for this tenant."""
    headers = {"Cache_Control": "no-cache", "Authorization": f"Bearer {key}"}
    answer = await gateway.send("POST", CHAT, LONG, **headers)
    assert answer.status == 200
    tokens = int(answer.headers["x-keepgate-prefix-tokens"])
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens
    return tokens


def variables_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


async def until_on_disk(gateway: Serving) -> None:
    """Return when the prefix store has written something, which follows the answer."""

    async def has_blocks() -> bool:
        (said,) = (await gateway.send("GET", PREFIX)).json["upstreams"].values()
        return bool(said["tiers"]["disk"]["blocks"])

    await until(has_blocks, DEADLINE, every=0.02)


async def test_what_was_prefilled_once_is_not_prefilled_after_a_restart(tmp_path: Path) -> None:
    """Prefixes of a tenant are read from the state folder after a restart, and the metrics count them."""
    async with serving(tmp_path) as gateway:
        assert f"  prefixes   kept in {tmp_path}/prefix" in gateway.lines
        assert await ask_anew(gateway, "sk-ours") == 0
        assert await ask_anew(gateway, "sk-ours") > 150
        await until_on_disk(gateway)
        entries = (await gateway.stats())["layers"]["exact"]["entries"]
        assert 1 <= entries <= 2  # the ledger of costs may be there too; the index's keys, of each block one, are not
        assert await gateway.signal(signal.SIGTERM) == 0
    assert (tmp_path / "prefix-secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "prefix").stat().st_mode & 0o777 == 0o700
    async with serving(tmp_path) as gateway:
        assert await ask_anew(gateway, "sk-theirs") == 0
        assert await ask_anew(gateway, "sk-ours") > 150
        figures = (await gateway.stats())["prefix"]
        assert figures["upstreams"].keys() == {"in-repo backend"}
        assert 0.3 < figures["hit_rate"] < 0.6
        emptied = (await gateway.send("DELETE", PREFIX)).json["upstreams"]
        assert [said["removed"] > 0 for said in emptied.values()] == [True]


async def test_prompts_are_looked_up_and_pinned_through_the_gateway(tmp_path: Path) -> None:
    """A prompt is looked up and pinned for the tenant of the key only."""
    async with serving(tmp_path) as gateway:
        await ask_anew(gateway, "sk-ours")
        await until_on_disk(gateway)
        prompt = {name: LONG[name] for name in ("model", "messages")}

        async def tokens(operation: str, key: str, figure: str) -> int:
            answer = await gateway.send("POST", f"{PREFIX}/{operation}", prompt, Authorization=f"Bearer {key}")
            (said,) = answer.json["upstreams"].values()
            on_disk: int = said[figure]["disk"]
            return on_disk

        for operation, figure in (
            ("lookup", "leading_tokens"),
            ("pin", "pinned_tokens"),
            ("unpin", "unpinned_tokens"),
        ):
            assert await tokens(operation, "sk-ours", figure) > 150
            assert await tokens(operation, "sk-theirs", figure) == 0
        refused = await gateway.send("POST", PREFIX + "/pin", {"model": MODEL, "messages": 1})
        assert (refused.status, refused.error["param"]) == (400, "messages")


async def test_a_prefix_store_of_size_zero_is_off(tmp_path: Path) -> None:
    """A prefix store of size zero gives the backend no folder, and it reports no store."""
    async with serving(tmp_path, "--prefix-disk-size", "0") as gateway:
        assert "  prefixes   in the engine's own memory only" in gateway.lines
        assert "--prefix" not in gateway.children()[gateway.child("-m backend")]
        refused = await gateway.send("DELETE", PREFIX)
        assert (refused.status, refused.error["code"]) == (404, "no_prefix_store")
    assert not (tmp_path / "prefix").exists()


async def test_no_command_line_has_a_password(tmp_path: Path, late_valkey: Valkey) -> None:
    """The password of a shared Redis is on no process's command line."""
    await late_valkey.start("--requirepass", "hush-hush")
    url = late_valkey.url.replace("unix://", "unix://:hush-hush@")
    async with serving(tmp_path, "--prefix-disk-size=1GiB", KEEPGATE_REDIS=url) as gateway:
        children = gateway.children()
        backend = gateway.child("-m backend")
        assert not any("hush-hush" in command for command in children.values())
        assert f"KEEPGATE_PREFIX_INDEX={url}" in variables_of(backend)
        assert await ask_anew(gateway, "sk-ours") == 0
    assert "hush-hush" not in gateway.said


async def test_an_impossible_disk_tier_is_reported_in_one_line(tmp_path: Path) -> None:
    """A configured disk tier that fails ends the start with status 1 and one line."""
    state = tmp_path / "file"
    state.touch()
    async with serving(state, "--redis", "none", "--prefix-disk-size", "1GiB", ready=False) as gateway:
        assert await gateway.ended() == 1
        assert gateway.lines[-1] == (
            f"keepgate: state_dir: nothing can be kept in {state}/prefix: Not a directory;"
            " or set backend.prefix_disk_size to 0"
        )
        assert "Traceback" not in gateway.said


async def test_the_backend_serves_without_a_state_folder(tmp_path: Path) -> None:
    """A gateway without a usable state folder logs the reason and starts."""
    state = tmp_path / "file"
    state.touch()
    async with serving(state, "--redis", "none") as gateway:
        assert f"nothing can be kept in {state}/prefix: Not a directory" in gateway.said
        assert await ask_anew(gateway, "sk-ours") == 0


async def test_a_refused_store_option_is_the_backends_own_line(tmp_path: Path) -> None:
    """A store option that the backend refuses ends the gateway with status 1 and the backend's own line."""
    short = tmp_path / "secret"
    short.write_text("short")
    for variables, message in (
        ({"KEEPGATE_BACKEND_PREFIX_SECRET_FILE": str(short)}, f"{short}: the secret has 5 bytes, expected 16 or more"),
        ({"KEEPGATE_BACKEND_PUBLIC_PREFIX": str(tmp_path / "no.txt")}, f"{tmp_path}/no.txt"),
    ):
        async with serving(tmp_path, "--redis", "none", ready=False, **variables) as gateway:
            assert await gateway.ended() == 1
            assert gateway.lines[-1].startswith("keepgate backend: ")
            assert message in gateway.lines[-1]
            assert "Traceback" not in gateway.said
