"""Checks of the engine and of the semantic cache, which load torch and numpy: processes of their own.

They run in the programs that would serve, and print a JSON object for each finding.
"""

import asyncio
import importlib.util
import shlex
import sys
from collections.abc import Sequence

import msgspec

from cache.semantic.embedding.model_files import models_folder
from gateway.commands.doctor.finding import Finding, Status, problem
from gateway.processes.child import running
from gateway.settings.settings import Settings

DEADLINE = 180.0
"""Seconds: torch may take ten to be imported, and the compiler thirty for the kernels."""
_STOP_SECONDS = 2.0
_MAX_SHOWN = 200


class _Line(msgspec.Struct):
    check: str
    status: Status
    summary: str
    advice: str = ""


async def check_engine(settings: Settings) -> list[Finding]:
    """Model, kernels and devices of the in-repo backend; nothing where upstreams are named."""
    if settings.upstreams:
        return []
    if importlib.util.find_spec("torch") is None:
        return [
            problem(
                "engine",
                "no upstream is named, and the in-repo backend is not installed",
                "name a server with --upstream URL, or install the extra: pip install 'keepgate[backend]'",
            )
        ]
    options = [f"--model={settings.model}", *settings.backend.options()]
    # Not fetched from a hub: that is for the first start.
    return await _run("engine", ["backend.commands.check", *options], {"HF_HUB_OFFLINE": "1"})


async def check_semantic_cache(settings: Settings) -> list[Finding]:
    """The embedding model and its encoder; nothing where the semantic cache is off."""
    if settings.semantic.mode == "off":
        return []
    if any(importlib.util.find_spec(name) is None for name in ("faiss", "sentence_transformers", "numpy")):
        return [
            problem(
                "semantic cache",
                f"semantic.mode is {settings.semantic.mode}, and the semantic cache is not installed",
                "install the extra: pip install 'keepgate[semantic]', or set semantic.mode to off",
            )
        ]
    names = ("model", "model_url", "model_prompt", "deadline")
    asked = {"models": str(models_folder()), **{name: getattr(settings.semantic, name) for name in names}}
    words = ["cache.semantic.evaluation.check", msgspec.json.encode(asked).decode()]
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if settings.semantic.model_key is not None:
        variables["KEEPGATE_SEMANTIC_MODEL_KEY"] = str(settings.semantic.model_key)
    return await _run("semantic cache", words, variables)


async def _run(check: str, words: Sequence[str], variables: dict[str, str]) -> list[Finding]:
    """The findings that a module prints, and one more if it fails."""
    # -P: the installed package, not one in the current directory.
    command = (sys.executable, "-P", "-m", *words)
    pipe = asyncio.subprocess.PIPE
    async with running(command, stdout=pipe, stderr=pipe, variables=variables, stop_deadline=_STOP_SECONDS) as process:
        output, errors = await process.communicate()
    found: list[Finding] = []
    for line in output.splitlines():
        try:
            found.append(Finding(**msgspec.structs.asdict(msgspec.json.decode(line, type=_Line))))
        except msgspec.DecodeError:  # of a library that prints
            continue
    if process.returncode:
        last = next(iter(reversed(errors.decode(errors="replace").strip().splitlines())), "it said nothing")
        found.append(
            problem(
                check,
                f"its check ended with status {process.returncode}: {last[-_MAX_SHOWN:]}",
                f"run `{shlex.join(command[2:])}` to see all of it",
            )
        )
    return found
