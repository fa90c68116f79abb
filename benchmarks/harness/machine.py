"""Where a measurement was made."""

import asyncio
import importlib.metadata
import os
import platform
import re
import shutil
from pathlib import Path

from benchmarks.harness.processes import ROOT, CannotMeasure, cores

_PACKAGES = (
    "aiohttp",
    "uvloop",
    "msgspec",
    "redis",
    "xxhash",
    "torch",
    "transformers",
    "faiss-cpu",
    "onnxruntime",
    "sentence-transformers",
)


def machine() -> dict[str, str]:
    """Hardware and system, in words."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    load, _, _ = os.getloadavg()
    return {
        "cpu": cpu[1].strip() if cpu else platform.machine(),
        "cores": str(len(cores().all)),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        # What else the machine was doing: above about 0.5, somebody else was measured too.
        "load before": f"{load:.1f}",
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


async def commit() -> str:
    """The commit that is checked out, with "+" where the measured packages differ from it."""
    head = await git("rev-parse", "--short=12", "HEAD")
    changed = await git("status", "--porcelain", "--", "gateway", "cache", "backend", "prefix_store", "telemetry")
    return head + ("+" if changed else "")


async def git(*words: str) -> str:
    if shutil.which("git") is None:
        raise CannotMeasure("git is not installed; it tells which commit is measured.")
    process = await asyncio.create_subprocess_exec(
        "git", *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, complaint = await process.communicate()
    if process.returncode:
        raise CannotMeasure(f"git {words[0]} failed: {complaint.decode().strip()}")
    return said.decode().strip()
