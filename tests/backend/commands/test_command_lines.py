"""The command lines of the backend: their messages for wrong arguments, and what they import."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

PLAN = (str(Path(sys.executable).with_name("keepgate")), "plan")
PROFILE = (str(Path(sys.executable).with_name("keepgate")), "profile")
EVAL = (sys.executable, "-m", "backend.commands.eval")


@pytest.mark.parametrize(
    ("command", "words", "status", "message"),
    [
        (PLAN, ("absent.gguf", "--memory", "24GB"), 1, "absent.gguf: no such file"),
        (PLAN, ("default",), 2, "--memory"),
        (PLAN, ("default", "--memory", "much"), 2, "'much' is no size"),
        (PLAN, ("default", "--memory", "24GB", "--kv-dtype", "int2"), 2, "int2"),
        (EVAL, ("default",), 2, "--text"),
        (EVAL, ("default", "--text", "absent.txt"), 1, "absent.txt: cannot be read: No such file"),
        (EVAL, ("default", "--text", "a", "--stride", "512"), 2, "--stride: 512 is out of range, expected 1 to 511"),
        (EVAL, ("default", "--text", "a", "--window", "1"), 2, "'1' is out of range, expected 2 or more"),
        (EVAL, ("default", "--text", "a", "--limit", "0"), 2, "'0' is out of range, expected 1 or more"),
        (EVAL, ("default", "--text", "a", "--quantization", "int3"), 2, "int3"),
        (PROFILE, ("--try", "int3"), 2, "'int3' is no change, expected all or some of int8,int4"),
        (PROFILE, ("--rounds", "1"), 2, "'1' is out of range, expected 2 to 1000"),
        (PROFILE, ("--concurrency", "0"), 2, "'0' is out of range, expected 1 or more"),
        (PROFILE, ("--price-per-hour", "-1"), 2, "'-1' is out of range, expected 0 to 100000"),
        (PROFILE, ("--port", "80"), 2, "--port"),
        (PROFILE, ("--requests", "absent.jsonl"), 1, "--requests absent.jsonl: No such file"),
        (PROFILE, ("--output", "/dev/null"), 1, "--output /dev/null: File exists; expected a folder to write to"),
    ],
)
async def test_wrong_arguments_are_one_line(
    command: tuple[str, ...], words: tuple[str, ...], status: int, message: str
) -> None:
    """A wrong argument is one line on stderr that names it, with nothing on stdout."""
    process = await asyncio.create_subprocess_exec(
        *command, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, out) == (status, b"")
    assert len(err.splitlines()) == 1
    assert message in err.decode()


@pytest.mark.parametrize("module", ["eval", "plan", "profile", "quantize"])
async def test_a_command_line_imports_no_torch(module: str) -> None:
    """The module of a command imports neither torch nor transformers, so that `--help` is fast."""
    check = f"import sys, backend.commands.{module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", check)
    assert await process.wait() == 0
