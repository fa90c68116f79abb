"""Builds the fused CPU step with the machine's own compiler, once, into the user's cache directory."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import xxhash

from backend.checkpoints.gguf.convert import Progress
from backend.model_loader.source import cache_directory
from backend.runners.errors import RunnerUnavailable

_SOURCE = Path(__file__).parent / "step" / "fused_step.cpp"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_BUILD_TIMEOUT_SECONDS = 120


def source_digest() -> str:
    """Of the fused step as it is written; 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(_sources())


def load_fused_library(progress: Progress) -> ctypes.CDLL:
    """Builds the library if this machine has not built this source yet, and loads it.

    Raises:
        RunnerUnavailable: no compiler, or one that refuses the source (a CPU without the instructions).
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RunnerUnavailable("no C++ compiler (g++) on PATH")
    target = cache_directory() / "kernels" / f"fused_step-{_digest(compiler)}.so"
    if not target.is_file():
        progress("building the fused CPU step, once")
        _build(compiler, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise RunnerUnavailable(f"{target} cannot be loaded ({error})") from error


def _build(compiler: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        output = Path(work) / target.name
        command = [compiler, *_FLAGS, "-o", str(output), str(_SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_SECONDS)  # noqa: S603 - our own source, the user's compiler
        except subprocess.CalledProcessError as error:
            first = next((line for line in error.stderr.splitlines() if "error" in line), "no message")
            raise RunnerUnavailable(f"{compiler} refuses the source ({first.strip()})") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunnerUnavailable(f"{compiler} does not run ({error})") from error
        output.rename(target)  # atomic: two processes that build at once both end with a whole file


def _digest(compiler: str) -> str:
    """Names the build: same source, flags, compiler and CPU features, same file."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603 - the user's compiler
    parts = (*_FLAGS, version, platform.machine(), _cpu_features())
    return xxhash.xxh3_64_hexdigest(_sources() + "\0".join(parts).encode())


def _sources() -> bytes:
    """The source and the headers beside it, each with its name."""
    files = sorted(path for path in _SOURCE.parent.iterdir() if path.suffix in (".cpp", ".h"))
    return b"\0".join(part for path in files for part in (path.name.encode(), path.read_bytes()))


def _cpu_features() -> str:
    """What ``-march=native`` depends on: a cache directory may be shared by different machines."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return platform.processor()
    lines = path.read_text("utf-8", "replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
