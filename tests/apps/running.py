"""Programs of the clients, run as processes of their own."""

import asyncio
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

PROGRAMS = Path(__file__).resolve().parent / "programs"
# Ample for a busy machine, on which the import of some takes ten seconds; what takes longer hangs.
DEADLINE = 150.0


def clients() -> Path:
    """The folder into which the clients were installed."""
    return Path(os.environ["TEST_CLIENTS"]).absolute()


def program(name: str, environment: str) -> list[str]:
    """The command that runs a program with the clients of an environment; its arguments follow."""
    if environment == "npm":
        return ["node", str(PROGRAMS / name), str(clients() / "npm")]
    return [str(clients() / environment / "bin" / "python"), str(PROGRAMS / name)]


async def run_program(command: list[str], **arguments: Any) -> dict[str, Any]:
    """What a program tells of its checks. It has no setting of the user's and an empty folder as its home."""
    with tempfile.TemporaryDirectory(prefix="kg-app-") as folder:
        words = msgspec.json.encode({**arguments, "folder": folder}).decode()
        return last_json(await run([*command, words], Path(folder)))


async def run(command: list[str], folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """The standard output of a command, whose home is the folder. Fails the test where it fails or takes too long."""
    plain = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**plain, **(variables or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE):
            told, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{said.decode()[-4000:]}\n{told.decode()[-2000:]}"
    return told.decode()


def last_json(told: str) -> dict[str, Any]:
    """The last line of an output, before which a library may have said something of its own."""
    found: dict[str, Any] = msgspec.json.decode(told.strip().splitlines()[-1])
    return found
